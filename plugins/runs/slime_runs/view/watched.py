"""A run that a page polls: data already read are kept, and only additions are read.

`Run` reads everything again at each call. That suits a command, but is too slow for a polled page.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import orjson

from slime_core.errors import SlimeError
from slime_core.files import open_regular
from slime_runs import Run
from slime_runs.files import FOLDER, Row, parsed_lines, shadow_name, whole_lines
from slime_runs.index import Filter, Index, Key
from slime_runs.ledger import LedgerIndex
from slime_runs.notes import FILE as NOTE
from slime_runs.run import RunError, by_step
from slime_runs.timeline import FILE as TIMELINE
from slime_runs.trace import TraceIndex

logger = logging.getLogger(__name__)

_AHEAD_S = 1.0
"""Seconds until the first page has probably been shown."""


class UnreadableError(RunError):
    """Files of a run have unexpected content."""


class WatchedRun(Run):
    """A run with cached data. Hold `lock` while calling its methods."""

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self.lock = threading.RLock()
        self._metrics = _Tail(self.path / "metrics.jsonl")
        self._settings: tuple[Any, dict[str, tuple[Any, str]]] = (None, {})
        self._parts: tuple[Any, list[tuple[float, int]]] = (None, [])
        self._index: Index | None = None
        self._indexed: Any = None
        self._shadows: dict[int, tuple[Any, dict[Key, Row]]] = {}
        self._ahead: threading.Timer | None = None
        self._steps: list[dict[str, Any]] = []

    def metrics(self) -> list[dict[str, Any]]:
        """Same as `Run.metrics`, cached."""
        if self._metrics.read():
            self._steps = by_step(self._metrics.lines)
        return self._steps

    def settings(self) -> dict[str, tuple[Any, str]]:
        """Same as `Run.settings`, cached."""
        now = stamp(self.path / "config.yaml")
        if self._settings[0] != now:
            self._settings = (now, super().settings())
        return self._settings[1]

    def parts(self) -> list[tuple[float, int]]:
        """Same as `Run.parts`, cached."""
        now = stamp(self.path / TIMELINE)
        if self._parts[0] != now:
            self._parts = (now, super().parts())
        return self._parts[1]

    def index(self, wanted: Filter | None = None) -> Index:
        """Return one index of all files, brought up to date; `wanted` is ignored."""
        now = stamp(self.path / FOLDER)
        if self._index is None:
            self._index = super().index()
        elif self._indexed != now:
            self._index.update()
        self._indexed = now
        return self._index

    def shadow(self, rollout: int) -> dict[Key, Row]:
        """Same as `Run.shadow`, cached."""
        now = stamp(self.path / FOLDER / shadow_name(rollout))
        if now is None:
            return {}
        if self._shadows.get(rollout, (None, {}))[0] != now:
            self._shadows.pop(rollout, None)
            self._shadows[rollout] = (now, super().shadow(rollout))
            if len(self._shadows) > _SHADOWS:
                del self._shadows[next(iter(self._shadows))]
        return self._shadows[rollout][1]

    @cached_property
    def timeline(self) -> TraceIndex:
        """Same as `Run.timeline`."""
        return TraceIndex(self.path / TIMELINE)

    @cached_property
    def ledger(self) -> LedgerIndex:
        """Index of the fates of the run's groups."""
        return LedgerIndex(self)

    def read_ahead(self) -> None:
        """Begin to read the trace, which the next page probably needs, once this page has been shown."""
        if not self._ahead:
            self._ahead = threading.Timer(_AHEAD_S, self.timeline.update_beside)
            self._ahead.daemon = True
            self._ahead.start()

    def stamp(self) -> str:
        """Return a text that changes when there is new data."""
        names = ("metrics.jsonl", "incidents.jsonl", "events.jsonl", "summary.json", "stalls", NOTE, FOLDER)
        return orjson.dumps([self.state(), *(stamp(self.path / name) for name in names)]).decode()


@contextmanager
def readable(*runs: Run) -> Iterator[None]:
    """Raise UnreadableError for invalid files: a run's directory may come from another version or another program."""
    try:
        yield
    except SlimeError:
        raise
    except (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError) as error:
        places = ", ".join(str(run.path) for run in runs)
        logger.warning("%s: cannot be read", places, exc_info=True)
        raise UnreadableError(f"{places}: cannot be read: {type(error).__name__}: {error}") from error


_SHADOWS = 60
"""Number of rollouts whose shadows are kept."""
_COMPARED = 200
"""Number of bytes that are compared to detect a rewritten file."""


class _Tail:
    """The lines of a file that grows."""

    def __init__(self, path: Path) -> None:
        self.lines: list[dict[str, Any]] = []
        self._path = path
        self._at, self._before = 0, b""

    def read(self) -> bool:
        """Read added lines, or all lines of a replaced file. Return whether anything changed."""
        try:
            file = open_regular(self._path)
        except OSError:  # missing, or not a regular file
            gone, self.lines, self._at, self._before = bool(self.lines), [], 0, b""
            return gone
        with file:
            if os.fstat(file.fileno()).st_size == self._at:
                return False
            file.seek(self._at - len(self._before))
            if file.read(len(self._before)) != self._before:  # the file was rewritten
                self.lines, self._at = [], 0
                file.seek(0)
            lines = []
            for line in whole_lines(self._path, file):
                lines.append(line)
                self._at += len(line)
        self._before = b"".join(lines[-_COMPARED:])[-_COMPARED:] or self._before
        self.lines += parsed_lines(lines)
        return bool(lines)


def stamp(path: Path) -> tuple[int, int] | None:
    """Return a value that changes when a file or folder changes; None if it cannot be read."""
    try:
        state = path.stat()
    except OSError:
        return None
    return state.st_mtime_ns, state.st_size
