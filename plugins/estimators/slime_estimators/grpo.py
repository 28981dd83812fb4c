"""GRPO: the advantage of a response is its reward relative to the other responses to the same prompt.

A_t = (r - mean(group)) / (std(group) + 1e-6) for every token of the response, with the unbiased deviation (Shao et
al., "DeepSeekMath", 2024). `--disable-grpo-std-normalization` leaves out the division (Liu et al., "Understanding
R1-Zero-Like Training", 2025: Dr. GRPO); `--disable-rewards-normalization` uses the rewards as they are. The policy
loss is the base class's clipped surrogate.
"""

from __future__ import annotations

from slime_core import Args, EstimatorBase, RewardInputs
from slime_core.ops import group_normalize


class GRPO(EstimatorBase):
    """Group-normalised rewards, broadcast to the tokens. A group of one gets advantage 0."""

    compares_group = True

    def shape_rewards(self, args: Args, inputs: RewardInputs) -> list[float]:
        """[n] rewards normalised within each `group_index`; fan-out siblings count as one member."""
        if not args.rewards_normalization:
            return super().shape_rewards(args, inputs)
        return group_normalize(inputs.rewards, inputs.group_indices, args.grpo_std_normalization, inputs.rollout_ids)
