"""Turn credit: the return from a turn on, minus what the other responses got from that turn on.

A_ik = G_ik - b_ik, G_ik = sum over l >= k of gamma^(l - k) r_il, and b_ik the mean of G_jk over the *other* rollouts j
of the group that reached turn k, 0 if none did (RLOO, Kool et al., 2019, turn by turn). The baseline does not depend on
response i, so the gradient of the expected return is unbiased.

The natural construction is not: rewards centred by turn index and then summed subtract a baseline with as many terms
as the response has turns, which is an action of the policy. It hides -E[r] in every decision to take another turn
(verl #7244, 2026).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import ClassVar

from slime_core import AdvantageInputs, Advantages, Args, EstimatorBase, PluginOptions, RewardInputs, options
from slime_estimators.turns import TurnOptions, returns, turn_rewards


class TurnCredit(EstimatorBase):
    """Returns of turns minus those of the group's other rollouts. A group of one gets advantage 0."""

    compares_group = True
    Options: ClassVar[type[PluginOptions]] = TurnOptions
    ignores: ClassVar[Sequence[str]] = ("rewards_normalization", "grpo_std_normalization")

    def __init__(self, args: Args) -> None:
        super().__init__(args)
        self.on_top = options(args, "turn_credit", TurnOptions).on_top

    def shape_turns(self, args: Args, inputs: RewardInputs) -> list[list[float]]:
        """[n][turns] advantages; fan-out siblings are one rollout, and not each other's baseline."""
        found = [returns(row, args.gamma) for row in turn_rewards(inputs, self.on_top)]
        groups: dict[int, set[int]] = defaultdict(set)
        reached: dict[tuple[int, int], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        for group, rollout, row in zip(inputs.group_indices, inputs.rollout_ids, found):
            groups[group].add(rollout)
            for k, value in enumerate(row):
                reached[group, k][rollout].append(value)
        means = {key: {r: math.fsum(v) / len(v) for r, v in members.items()} for key, members in reached.items()}

        def advantage(group: int, rollout: int, k: int, value: float) -> float:
            others = [mean for other, mean in means[group, k].items() if other != rollout]
            return value - math.fsum(others) / max(len(others), 1) if len(groups[group]) > 1 else 0.0

        rows = zip(inputs.group_indices, inputs.rollout_ids, found)
        return [[advantage(group, rollout, k, v) for k, v in enumerate(row)] for group, rollout, row in rows]

    def advantages(self, args: Args, inputs: AdvantageInputs) -> Advantages:
        """Return the advantage of its turn for every token."""
        parts = inputs.over_turns(inputs.turn_rewards)
        return Advantages(advantages=parts, returns=list(parts))
