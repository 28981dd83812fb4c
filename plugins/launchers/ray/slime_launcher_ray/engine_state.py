"""What an engine has been told that another one in its place must be told again: weights, a pause, memory given up.

`engine_proxy` notes it with each call that succeeded. The buckets of the last update stay in the object store for it,
one copy of the weights and two while they are updated; a directory stays as long as `weights/sync.py` keeps it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

TAGS = ("weights", "kv_cache")
"""What `release_memory` gives up, where it is not told what."""


@dataclass(frozen=True)
class Update:
    """A weight version that was served."""

    method: str
    """Of the engine."""
    payload: Any
    """[reference] of each bucket, or what the transport handed over, such as a directory."""
    version: int
    in_buckets: bool = False


class EngineState:
    """Of one engine."""

    def __init__(self) -> None:
        self.update: Update | None = None
        """The last one that it has served; None: it serves what it was started with."""
        self._paused: str | None = None
        self._released: set[str] = set()

    def note(self, method: str, *args: Any) -> None:
        """A call of a control method that went well."""
        if method == "pause":
            self._paused = args[0]
        elif method == "resume":
            self._paused = None
        elif method == "release_memory":
            self._released |= set(_tags(args[0]))
        elif method == "resume_memory":
            self._released -= set(_tags(args[0]))

    def calls(self) -> list[tuple[Any, ...]]:
        """Control calls for an engine that has the weights, (method, arguments...)."""
        paused = [("pause", self._paused)] if self._paused is not None else []
        released = [("release_memory", sorted(self._released))] if self._released else []
        return [*paused, *released]


def _tags(tags: Sequence[str] | None) -> Sequence[str]:
    return TAGS if tags is None else tags
