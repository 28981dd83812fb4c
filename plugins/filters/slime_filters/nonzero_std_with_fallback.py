"""Drops groups whose rewards are all equal, as long as there are others: `nonzero_std` that never draws a group more.

The condition, the reasons and the option `of` are `nonzero_std`'s (DAPO, Yu et al., 2025; the fallback is
THUDM/slime's). A dropped group stays when the rollout would otherwise lack a group. So only what was started in excess
(`--over-sampling-batch-size`) is chosen from, and the number of prompts per rollout is bounded.
"""

from __future__ import annotations

from dataclasses import replace

from slime_core import Args, FilterDecision, Group, options
from slime_filters import nonzero_std


class Options(nonzero_std.Options):
    """Numbers that must differ within a group."""


def dynamic_filter(args: Args, samples: Group) -> FilterDecision:
    """Return the decision of `nonzero_std`; a group that it drops may stay when there are too few."""
    found = nonzero_std.decision(args, samples, options(args, "nonzero_std_with_fallback", Options).of)
    return found if found.keep else replace(found, keep_when_insufficient=True)
