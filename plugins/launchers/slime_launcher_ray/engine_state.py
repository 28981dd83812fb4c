"""State of an engine that a replacement engine must get: weights, a pause, released memory.

`engine_proxy` records each successful call. For this, the buckets of the last update stay in the object store: one copy
of the weights, and two during an update. A directory stays as long as `weights/sync.py` keeps it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

TAGS = ("weights", "kv_cache")
"""Memory that `release_memory` releases by default."""


@dataclass(frozen=True)
class Update:
    """A weight version that was served."""

    method: str
    """Method of the engine that loads the weights."""
    payload: Any
    """[reference] of each bucket, or the transport's payload, such as a directory."""
    version: int
    in_buckets: bool = False


class EngineState:
    """State of one engine."""

    def __init__(self) -> None:
        self.update: Update | None = None
        """Last update that the engine has served; None: it serves its initial weights."""
        self._paused: str | None = None
        self._released: set[str] = set()

    def note(self, method: str, *args: Any) -> None:
        """Record a successful call of a control method."""
        if method == "pause":
            self._paused = args[0]
        elif method == "resume":
            self._paused = None
        elif method == "release_memory":
            self._released |= set(_tags(args[0]))
        elif method == "resume_memory":
            self._released -= set(_tags(args[0]))

    def calls(self) -> list[tuple[Any, ...]]:
        """Return the control calls, (method, arguments...), for an engine that already has the weights."""
        paused = [("pause", self._paused)] if self._paused is not None else []
        released = [("release_memory", sorted(self._released))] if self._released else []
        return [*paused, *released]


def _tags(tags: Sequence[str] | None) -> Sequence[str]:
    return TAGS if tags is None else tags
