"""Dr. GRPO: GRPO without its two biases (Liu et al., "Understanding R1-Zero-Like Training", 2025).

A_t = r - mean(group) for every token of the response: no division by the group's deviation, which favours prompts
that are too easy or too hard. The loss of a response is the sum over its tokens divided by one constant, the longest
response allowed (the reducer `constant`), not by its own length, which favours long wrong answers. The policy loss is
the base class's clipped surrogate.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from slime_core import Args, EstimatorBase, RewardInputs
from slime_core.ops import group_normalize


class DrGRPO(EstimatorBase):
    """[n] rewards minus the group's mean, broadcast to the tokens. A group of one gets advantage 0."""

    compares_group = True
    defaults: ClassVar[Mapping[str, Any]] = {
        "grpo_std_normalization": False,
        "custom_pg_loss_reducer_function_path": "constant",
    }
    requires: ClassVar[Mapping[str, Any]] = {"grpo_std_normalization": False}

    def shape_rewards(self, args: Args, inputs: RewardInputs) -> list[float]:
        """[n] rewards minus the mean of each `group_index`."""
        if not args.rewards_normalization:
            return super().shape_rewards(args, inputs)
        return group_normalize(inputs.rewards, inputs.group_indices, False, inputs.rollout_ids)
