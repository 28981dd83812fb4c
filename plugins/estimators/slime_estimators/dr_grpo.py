"""Dr. GRPO: GRPO without its two biases (Liu et al., "Understanding R1-Zero-Like Training", 2025).

A_t = r - mean(group) for every token of the response: no division by the group's deviation, which favours prompts
that are too easy or too hard. The loss of a response is the sum over its tokens divided by one constant, the longest
response allowed (the reducer `constant`), not by its own length, which favours long wrong answers. The policy loss is
the base class's clipped surrogate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch

from slime_core import Args, EstimatorBase, RewardInputs
from slime_core.errors import ConfigError
from slime_core.ops import group_normalize, masked


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


def constant(
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    loss_masks: Sequence[torch.Tensor],
    calculate_per_token_loss: bool,
    args: Args,
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return Dr. GRPO's reducer: the sum over a response's tokens / `--rollout-max-response-len`.

    Unlike a mean over the response, every token weighs the same in every response, so long wrong answers are not
    favoured. With `--calculate-per-token-loss` the plain sum, which is divided by the step's tokens.

    Raises:
        ConfigError: No `--rollout-max-response-len`.
    """
    if not args.rollout_max_response_len:
        raise ConfigError("loss reducer 'constant' divides by --rollout-max-response-len N, which is not set")
    divisor = 1 if calculate_per_token_loss else args.rollout_max_response_len
    mask = torch.cat(list(loss_masks))
    return lambda values: masked(values, mask.to(values.dtype)).sum() / divisor
