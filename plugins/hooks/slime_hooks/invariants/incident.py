"""The record of an invariant that does not hold."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import NamedTuple

FILE = "incidents.jsonl"
"""File in the run's directory with one JSON object per line: `rollout_id` and the fields of `Incident`."""


CENTRED = ("grpo", "gspo", "cispo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline")
"""Estimators that subtract a mean of the group."""


class Incident(NamedTuple):
    """An invariant that does not hold."""

    check: str
    """Name of the invariant."""
    cause: str
    """Possible causes, most likely first."""
    numbers: str
    """Observed values, as text."""


def foreign_tokens(count: int) -> Incident:
    """Make the incident for trained tokens that the policy did not sample.

    Two checks use it, one of which may run in another process than the samples.
    """
    return Incident(
        "mask_within_the_sampled",
        "tokens are trained that the policy did not sample: the mask is shifted, or tool output is in it",
        f"{count} tokens",
    )


def moments(first: Sequence[float], second: Sequence[float]) -> tuple[float, float, float]:
    """Return the unbiased standard deviations of two columns and their covariance; 0 for one row."""
    if len(first) < 2:
        return 0.0, 0.0, 0.0
    means = sum(first) / len(first), sum(second) / len(second)
    one, other = ([value - mean for value in column] for column, mean in zip((first, second), means))
    squares, others, products = (sum(map(operator.mul, *pair)) for pair in ((one, one), (other, other), (one, other)))
    return math.sqrt(squares / (len(first) - 1)), math.sqrt(others / (len(first) - 1)), products / (len(first) - 1)
