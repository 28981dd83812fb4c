"""GSPO: GRPO with one importance ratio per response (Zheng et al., "Group Sequence Policy Optimization", 2025).

s = exp(mean over the response's tokens of (log p_new - log p_old)); every token of the response has this ratio, and
the clip acts on whole responses. Advantages are GRPO's: (r - mean(group)) / (std(group) + 1e-6). Since s is a
geometric mean, it stays close to 1, and the paper clips far tighter than PPO: `--eps-clip 3e-4 --eps-clip-high 4e-4`.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from slime_core import Args, EstimatorBase, RewardInputs
from slime_core.ops import group_normalize


class GSPO(EstimatorBase):
    """Group-normalised rewards [n], sequence-level ratio. A group of one gets advantage 0."""

    compares_group = True
    ratio_level: ClassVar[Literal["token", "sequence"]] = "sequence"

    def shape_rewards(self, args: Args, inputs: RewardInputs) -> list[float]:
        """[n] rewards normalised within each `group_index`, as GRPO's."""
        if not args.rewards_normalization:
            return super().shape_rewards(args, inputs)
        return group_normalize(inputs.rewards, inputs.group_indices, args.grpo_std_normalization, inputs.rollout_ids)
