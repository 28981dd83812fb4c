"""Rollout numbers of people in commands' input and output, from and to the numbers of stored samples.

People count rollouts from 1. `Entry.rollout` and files count from 0, except for an evaluation, which has the number of
rollouts trained on before it.
"""

from __future__ import annotations

from slime_core.errors import rollout_name, rollout_number
from slime_runs.run import RunError


def shown_number(rollout: int, data_set: str | None = None) -> int:
    """Return the number to show for a stored `rollout`; `data_set` is an evaluation's."""
    return rollout if data_set else rollout_number(rollout)


def shown_place(rollout: int, data_set: str | None = None) -> str:
    """Return where samples come from: "rollout 4", or "evaluation of gsm8k after 4 rollouts"."""
    return f"evaluation of {data_set} after {rollout} rollouts" if data_set else rollout_name(rollout)


def stored_rollout(flag: str, number: int | None, data_set: str | None = None) -> int | None:
    """Return the stored `rollout` of a number that a user typed. Raises RunError if no rollout has the number."""
    if number is None or data_set:
        return number
    if number < rollout_number(0):
        raise RunError(f"{flag} {number}: no such rollout; rollouts count from {rollout_number(0)}")
    return number - rollout_number(0)
