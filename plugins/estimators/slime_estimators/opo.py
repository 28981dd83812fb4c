"""OPO: the baseline of a group is its mean reward weighted by length (Hao et al., arXiv 2505.23585, 2025).

A_t = r - sum_j l_j r_j / sum_j l_j over the group's responses, l the number of trained tokens. The baseline that
minimises the variance of the policy gradient weighs rewards by the squared norm of each response's gradient, which
grows with the length when tokens have about equal gradients that are orthogonal. That holds for a response's summed
loss, so the preset brings the mean over tokens. The paper trains strictly on policy, without KL and entropy terms.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from slime_core import Args, EstimatorBase, RewardInputs
from slime_core.ops import group_members


class OPO(EstimatorBase):
    """[n] rewards minus the group's mean by length. A group of one gets advantage 0."""

    compares_group = True
    defaults: ClassVar[Mapping[str, Any]] = {"calculate_per_token_loss": True}
    ignores: ClassVar[Sequence[str]] = ("rewards_normalization", "grpo_std_normalization")

    def shape_rewards(self, args: Args, inputs: RewardInputs) -> list[float]:
        """[n] -> [n]; fan-out siblings are one member, of their mean reward and mean length."""
        ids = (inputs.group_indices, inputs.rollout_ids)
        rewards, lengths = group_members(inputs.rewards, *ids), group_members(inputs.response_lengths, *ids)
        baselines = {
            group: _mean([*members.values()], [*lengths[group].values()]) for group, members in rewards.items()
        }
        return [float(reward) - baselines[group] for reward, group in zip(inputs.rewards, inputs.group_indices)]


def _mean(rewards: list[float], lengths: list[float]) -> float:
    """Return the mean by length, or the plain mean if no response has a trained token; exact for equal rewards."""
    weights = lengths if any(lengths) else [1.0] * len(lengths)
    gaps = (weight * (reward - rewards[0]) for reward, weight in zip(rewards, weights))
    return rewards[0] + math.fsum(gaps) / math.fsum(weights)
