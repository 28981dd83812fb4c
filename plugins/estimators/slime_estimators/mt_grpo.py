"""MT-GRPO: GRPO for the outcome, and for each turn's own reward (Zeng et al., arXiv 2505.11821, 2025).

A_ik = turn_weight * (r_ik - mean_k) / (std_k + 1e-6) + (R_i - mean) / (std + 1e-6), with the statistics of turn k over
the group's rollouts for which k is not the last turn; the last turn has the second term alone. R_i is the outcome: what
the turns before the last one leave of the sample's reward. The paper has the weight on the second term, its code on the
first; at 1 they agree.

A turn is credited with its own reward and the outcome, not with the rewards of later turns: where a policy decides how
many turns to take, that is not the gradient of the sum. `turn_credit` is.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from slime_core import Args, PluginOptions, RewardInputs, options
from slime_core.ops import group_normalize
from slime_estimators.turns import SampleAndTurns, TurnOptions, numbered, turn_rewards


class Options(TurnOptions):
    """`plugins.mt_grpo.*`"""

    turn_weight: Annotated[float, Field(ge=0)] = 1.0
    """Weight of the turns' own rewards."""


class MTGRPO(SampleAndTurns):
    """Group-normalised outcomes, and rewards of turns normalised by turn. A group of one gets advantage 0."""

    Options: ClassVar[type[PluginOptions]] = Options

    def __init__(self, args: Args) -> None:
        super().__init__(args)
        self.chosen = options(args, "mt_grpo", Options)

    def shape_rewards(self, args: Args, inputs: RewardInputs) -> list[float]:
        """[n] outcomes, normalised within each `group_index`."""
        rewards = zip(turn_rewards(inputs, self.chosen.on_top), inputs.rewards)
        outcomes = [row[-1] if row else reward for row, reward in rewards]
        return group_normalize(outcomes, inputs.group_indices, args.grpo_std_normalization, inputs.rollout_ids)

    def shape_turns(self, args: Args, inputs: RewardInputs) -> list[list[float]]:
        """[n][turns] rewards of turns, normalised within the group's turns of that number; 0 for the last turn."""
        rewards = turn_rewards(inputs, self.chosen.on_top)
        places = [(i, k) for i, row in enumerate(rewards) for k in range(len(row) - 1)]
        shaped = group_normalize(
            [rewards[i][k] for i, k in places],
            numbered([(inputs.group_indices[i], k) for i, k in places]),
            args.grpo_std_normalization,
            [inputs.rollout_ids[i] for i, _ in places],
        )
        found = [[0.0] * len(row) for row in rewards]
        for (i, k), value in zip(places, shaped):
            found[i][k] = self.chosen.turn_weight * value
        return found
