r"""0 to -factor by the number of response tokens: `overlong` (DAPO's soft punishment), or the distance to a target
length.

With n response tokens (`sample.response_length`)::

    overlong    0                               n <= max_length - buffer
                (max_length - buffer - n) / buffer    up to max_length       (Yu et al., DAPO, 2025, eq. 13)
                -1                              beyond
    linear      -d                              d = min(1, |n - target| / window)
    cosine      -(1 - cos(pi d)) / 2            the same d, flat near the target

each times `factor`. Made to be added to another reward (`weighted_sum`). Tool output counts, since it is part of the
response.
"""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field

from slime_core import Args, PluginOptions, RewardTraits, Sample, options
from slime_core.errors import ConfigError


class Options(PluginOptions):
    """`plugins: {length_penalty: {...}}`."""

    shape: Literal["overlong", "linear", "cosine"] = "overlong"
    """How the penalty grows: DAPO's overlong punishment, or by the distance to the target."""
    max_length: int | None = Field(None, gt=0)
    """overlong: tokens from which on the penalty is full; --rollout-max-response-len when not given."""
    buffer: int | None = Field(None, gt=0)
    """overlong: tokens before max_length over which the penalty grows; a fifth of max_length when not given."""
    target: int | None = Field(None, ge=0)
    """linear, cosine: tokens that cost nothing."""
    window: int | None = Field(None, gt=0)
    """linear, cosine: distance from the target at which the penalty is full; the target when not given."""
    shorter_is_free: bool = False
    """linear, cosine: only responses longer than the target are penalised."""
    factor: float = Field(1.0, ge=0, allow_inf_nan=False)
    """The full penalty."""


class LengthPenalty:
    """The options, checked when the run starts."""

    Options = Options
    traits = RewardTraits(execution="inline")

    def __init__(self, args: Args) -> None:
        given = options(args, "length_penalty", Options)
        self.options = given
        if given.shape == "overlong":
            self.max_length = given.max_length or args.rollout_max_response_len or 0
            if not self.max_length:
                raise ConfigError(
                    "plugins.length_penalty.max_length: must be given where --rollout-max-response-len is not;"
                    " type --set plugins.length_penalty.max_length=VALUE"
                )
            self.buffer = given.buffer or max(1, self.max_length // 5)
            if self.buffer > self.max_length:
                raise ConfigError(
                    f"plugins.length_penalty.buffer {self.buffer}: must not exceed max_length {self.max_length}"
                )
        else:
            if given.target is None:
                raise ConfigError(
                    f"plugins.length_penalty.target: must be given for shape {given.shape!r};"
                    " type --set plugins.length_penalty.target=VALUE"
                )
            self.target, self.window = given.target, given.window or max(1, given.target)

    def __call__(self, args: Args, sample: Sample) -> float:
        """The penalty, in [-factor, 0]."""
        return self.options.factor * self.penalty(sample.response_length)

    def penalty(self, length: int) -> float:
        """The penalty before `factor`, in [-1, 0]."""
        if self.options.shape == "overlong":
            over = length - (self.max_length - self.buffer)
            return -min(1.0, over / self.buffer) if over > 0 else 0.0
        distance = length - self.target
        if self.options.shorter_is_free and distance < 0:
            return 0.0
        share = min(1.0, abs(distance) / self.window)
        penalty = share if self.options.shape == "linear" else (1 - math.cos(math.pi * share)) / 2
        return 0.0 - penalty
