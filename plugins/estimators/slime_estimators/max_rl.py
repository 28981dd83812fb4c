"""MaxRL: ascends log(probability of success) instead of the probability.

A_t = (r - mean(group)) / mean(group) for every token, 0 where no response succeeded (Tajwar, Zeng et al., "Maximum
Likelihood Reinforcement Learning", 2026, arXiv 2602.02710). With n responses the gradient is unbiased for the
likelihood's expansion up to order n, sum_k 1/k * grad pass@k: n = 1 would be REINFORCE, n -> infinity maximum
likelihood. Hard prompts weigh more than under GRPO. Derived for rewards 0 and 1; rewards in between are taken as
partial success, negative ones have no meaning and are refused. The policy loss is the base class's clipped surrogate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

from slime_core import Args, EstimatorBase, RewardInputs
from slime_core.errors import RolloutError
from slime_core.ops import group_members


class MaxRL(EstimatorBase):
    """[n] rewards, centred and divided by the group's mean. A group of one gets advantage 0."""

    compares_group = True
    ignores: ClassVar[Sequence[str]] = ("rewards_normalization", "grpo_std_normalization")

    def shape_rewards(self, args: Args, inputs: RewardInputs) -> list[float]:
        """[n] -> [n]; fan-out siblings are one member of their group.

        Raises:
            RolloutError: A reward is negative.
        """
        worst = min(inputs.rewards, default=0.0)
        if worst < 0:
            raise RolloutError(
                f"--advantage-estimator max_rl needs rewards of at least 0 (0 failed, 1 solved), got {worst:g};"
                " rescale the reward, or choose grpo"
            )
        groups = group_members(inputs.rewards, inputs.group_indices, inputs.rollout_ids)
        means = {group: math.fsum(members.values()) / len(members) for group, members in groups.items()}
        return [
            (float(reward) - means[group]) / means[group] if means[group] else 0.0
            for reward, group in zip(inputs.rewards, inputs.group_indices)
        ]
