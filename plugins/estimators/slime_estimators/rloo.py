"""RLOO: the baseline of a response is the mean reward of the *other* responses to the prompt.

A_t = r_i - mean_{j != i} r_j = n / (n - 1) * (r_i - mean(group)) for every token (Kool et al., "Buy 4 REINFORCE
Samples, Get a Baseline for Free!", 2019; Ahmadian et al., "Back to Basics", 2024). The baseline does not depend on the
response, so the gradient is unbiased. The policy loss is the base class's clipped surrogate, which at the first step
of a rollout is REINFORCE.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

from slime_core import Args, EstimatorBase, RewardInputs
from slime_core.ops import group_members


class RLOO(EstimatorBase):
    """[n] rewards minus the mean over the group's other members. A group of one gets advantage 0."""

    compares_group = True
    ignores: ClassVar[Sequence[str]] = ("rewards_normalization", "grpo_std_normalization")

    def shape_rewards(self, args: Args, inputs: RewardInputs) -> list[float]:
        """[n] -> [n]; fan-out siblings are one member and not each other's baseline."""
        groups = group_members(inputs.rewards, inputs.group_indices, inputs.rollout_ids)
        totals = {group: math.fsum(members.values()) for group, members in groups.items()}
        shaped = []
        for reward, group, rollout in zip(inputs.rewards, inputs.group_indices, inputs.rollout_ids):
            members = groups[group]
            others = len(members) - 1
            shaped.append(float(reward) - (totals[group] - members[rollout]) / others if others else 0.0)
        return shaped
