"""DAPO, a preset: four changes to GRPO that long answers ask for (Yu et al., "DAPO", 2025).

- clip-higher: the ratio may rise to 1.28 and fall to 0.8, so unlikely tokens can grow (`--eps-clip-high`);
- token-level loss: a mean over all tokens, so long answers count by their length (`--calculate-per-token-loss`);
- dynamic sampling: prompts whose answers all got the same reward are replaced (`--dynamic-sampling-filter-path`);
- overlong shaping: answers that come near the limit lose reward, linearly up to `overlong_penalty`::

    0 for length <= limit - buffer;  penalty * (limit - buffer - length) / buffer, at least -penalty, beyond

The first three are settings that `defaults` brings and the user may change; the fourth is here. No KL term unless asked
for. Advantages are GRPO's, of the shaped rewards; the filter sees the unshaped ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field

from slime_core import Args, EstimatorBase, PluginOptions, RewardInputs, options
from slime_core.errors import ConfigError
from slime_core.ops import group_normalize


class Options(PluginOptions):
    """`plugins.dapo.*`"""

    overlong_buffer_len: Annotated[int | None, Field(ge=1)] = None
    """Tokens before the limit over which the penalty grows; a fifth of the limit when not given (the paper's share)."""
    overlong_penalty: Annotated[float, Field(ge=0)] = 1.0
    """Reward lost by an answer of full length; 0 switches the shaping off."""


class DAPO(EstimatorBase):
    """Group-normalised rewards [n] after the overlong penalty."""

    compares_group = True
    Options: ClassVar[type[PluginOptions]] = Options
    defaults: ClassVar[Mapping[str, Any]] = {
        "eps_clip_high": 0.28,
        "calculate_per_token_loss": True,
        "dynamic_sampling_filter_path": "nonzero_std",
    }

    def __init__(self, args: Args) -> None:
        """Raises ConfigError when the buffer and the longest response do not fit together."""
        super().__init__(args)
        chosen = options(args, "dapo", Options)
        limit = args.rollout_max_response_len
        if chosen.overlong_penalty and limit is None:
            raise ConfigError(
                "--advantage-estimator dapo: its overlong penalty needs --rollout-max-response-len N; without a limit"
                " type --set plugins.dapo.overlong_penalty=0"
            )
        self.penalty = chosen.overlong_penalty
        self.limit = limit or 0
        self.buffer = chosen.overlong_buffer_len or max(1, self.limit // 5)
        if self.penalty and self.buffer > self.limit:
            raise ConfigError(
                f"plugins.dapo.overlong_buffer_len {self.buffer} must not exceed"
                f" --rollout-max-response-len {self.limit}"
            )

    def shape_rewards(self, args: Args, inputs: RewardInputs) -> list[float]:
        """[n] -> [n]: the penalty for the number of trained tokens, then the group's normalisation."""
        lengths = inputs.response_lengths
        shaped = [reward + self.overlong(length) for reward, length in zip(inputs.rewards, lengths)]
        if not args.rewards_normalization:
            return shaped
        return group_normalize(shaped, inputs.group_indices, args.grpo_std_normalization, inputs.rollout_ids)

    def overlong(self, length: int) -> float:
        """0 down to -penalty: what a response of `length` tokens is given on top of its reward."""
        beyond = length - (self.limit - self.buffer)
        return -self.penalty * min(max(beyond, 0) / self.buffer, 1.0) if self.penalty else 0.0
