"""Drops groups by the length of their responses, and by how many of them were cut at the token limit.

A cut response is scored wrong for its length and not for its reasoning (DAPO, Yu et al., 2025, section 3.4); groups in
which most are cut teach the model to be short and little else.
"""

from __future__ import annotations

import math
import statistics
from typing import Self

from pydantic import Field, model_validator

from slime_core import Args, FilterDecision, Group, PluginOptions, SampleStatus, executions, options


class Options(PluginOptions):
    """Bounds on a group."""

    min_mean: float = Field(default=0.0, ge=0)
    """Shortest mean response of a group, in tokens."""
    max_mean: float | None = Field(default=None, gt=0)
    """Longest mean response of a group, in tokens."""
    max_truncated: float = Field(default=0.5, ge=0, le=1)
    """Largest share of responses that were cut at the token limit."""
    fallback: bool = False
    """Keep a group out of bounds when the rollout would otherwise lack one."""

    @model_validator(mode="after")
    def _leaves_something(self) -> Self:
        if self.max_mean is not None and self.min_mean > self.max_mean:
            raise ValueError(f"min_mean {self.min_mean} is above max_mean {self.max_mean}")
        return self


def dynamic_filter(args: Args, samples: Group) -> FilterDecision:
    """Keep iff all bounds hold; the reason is `truncated`, `too_short` or `too_long`. Rewards are not looked at.

    Fan-out siblings count once: with their mean length, and with the share of them that was cut.
    """
    chosen = options(args, "length", Options)
    members = executions(samples)
    mean = math.fsum(statistics.fmean(s.response_length for s in siblings) for siblings in members) / len(members)
    cut = (statistics.fmean(s.status == SampleStatus.TRUNCATED for s in siblings) for siblings in members)
    truncated = math.fsum(cut) / len(members)
    reason = None
    if truncated > chosen.max_truncated:
        reason = "truncated"
    elif mean < chosen.min_mean:
        reason = "too_short"
    elif chosen.max_mean is not None and mean > chosen.max_mean:
        reason = "too_long"
    return FilterDecision(keep=reason is None, reason=reason, keep_when_insufficient=chosen.fallback)
