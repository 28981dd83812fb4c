"""Takes the oldest groups first."""

from __future__ import annotations

from typing import Any

from slime_core import Group


def buffer_filter(args: Any, rollout_id: int | None, buffer: list[Group], num_samples: int) -> list[Group]:
    """Remove the first `num_samples` groups from `buffer` and return them; fewer when it holds fewer."""
    taken = buffer[: max(0, num_samples)]
    del buffer[: len(taken)]
    return taken
