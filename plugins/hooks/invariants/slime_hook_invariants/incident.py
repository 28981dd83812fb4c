"""What an invariant that does not hold leaves behind."""

from __future__ import annotations

from typing import NamedTuple

FILE = "incidents.jsonl"
"""In the run's directory, a JSON object a line: `rollout_id` and the fields of `Incident`."""


CENTRED = ("grpo", "gspo", "cispo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline")
"""Estimators that subtract a mean of the group."""


class Incident(NamedTuple):
    """An invariant that does not hold."""

    check: str
    """Its name."""
    cause: str
    """What this comes from, most likely first."""
    numbers: str
    """What was seen."""


def foreign_tokens(count: int) -> Incident:
    """Of two checks, one of which may be in another process than the samples."""
    return Incident(
        "mask_within_the_sampled",
        "tokens are trained that the policy did not sample: the mask is shifted, or tool output is in it",
        f"{count} tokens",
    )
