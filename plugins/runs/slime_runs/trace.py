"""Read the events of one rollout from `trace.jsonl` without the rest, and a run's stages and busy times.

To read repeatedly, keep one `TraceIndex`: it reads only appended lines, and starts over if the file was replaced.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, BinaryIO

from slime_core.files import open_regular
from slime_runs.files import parsed_lines

Spans = list[tuple[float, float]]
_PIECE = 64 << 10
_START = re.compile(rb'\{"e":"run".*\n')
"""Pattern of a "run" event. It matches no string in an event, since JSON escapes quotes; a search for line starts takes
15 times as long."""
_ROLLOUT = re.compile(rb'"r":(\d+)')


@dataclass(frozen=True)
class _Piece:
    start: int
    size: int
    rollouts: frozenset[int]


class TraceIndex:
    """An index of the rollouts in each piece of a trace. Thread-safe."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stages: list[dict[str, Any]] = []
        """Events other than samples, up to the last `update`."""
        self.generating: Spans = []
        """Spans in which any sample was generated, without evaluations; in order, without overlaps."""
        self.scoring: Spans = []
        self.sampled = -1
        """The last rollout with a recorded sample; a long timeline stops recording samples."""
        self._pieces: list[_Piece] = []
        self._inode = 0
        self._lock = threading.Lock()

    def events(self, rollout: int) -> list[dict[str, Any]]:
        """Return a rollout's events, and pushes and saves without a rollout that began during or just after it."""
        self.update()
        if not (pieces := self._pieces):
            return []
        found: list[dict[str, Any]] = []
        with open_regular(self.path) as file:
            for piece in pieces:
                if rollout in piece.rollouts:
                    file.seek(piece.start)
                    found += _events(file.read(piece.size))
        own = [event for event in found if event.get("r") == rollout]
        if not own:
            return []
        start, end = min(_start(event) for event in own), max(event["t"][-1] for event in own)
        end += (end - start) / 10
        nameless = [e for e in found if "r" not in e and e["e"] != "run" and start <= _start(e) <= end]
        return sorted([*own, *nameless], key=_start)

    def update(self) -> None:
        """Read the appended lines; the first read of a long trace takes a few seconds."""
        with self._lock:
            while self._read_on():
                pass

    def update_beside(self) -> None:
        """Update on a background thread: pause three times as long as reading takes, so that other threads run."""
        more = True
        while more:
            began = time.monotonic()
            with self._lock:
                more = self._read_on()
            time.sleep(3 * (time.monotonic() - began))

    def _read_on(self) -> bool:
        """Read the next piece; return False at the end of the file."""
        try:
            with open_regular(self.path) as file:
                return self._read_piece(file)
        except OSError:  # the file is missing, or is not a regular file
            return False

    def _read_piece(self, file: BinaryIO) -> bool:
        state = os.fstat(file.fileno())
        read = self._pieces[-1].start + self._pieces[-1].size if self._pieces else 0
        if state.st_ino != self._inode or state.st_size < read:
            self._pieces, self._inode, read = [], state.st_ino, 0
            self.stages, self.generating, self.scoring, self.sampled = [], [], [], -1
        file.seek(read)
        lines = _whole_lines(file.read(_PIECE))
        if lines:
            self._pieces.append(_Piece(read, len(lines), frozenset(map(int, set(_ROLLOUT.findall(lines))))))
            self._add_up(lines)
        return bool(lines)

    def _add_up(self, lines: bytes) -> None:
        generating, scoring = self.generating, self.scoring
        for event in _events(lines):
            if event["e"] != "sample":
                self.stages.append(event)
            elif not event.get("ev"):
                began, generated, scored = event["t"]
                generating.append((began, generated))
                scoring.append((generated, scored))
                self.sampled = max(self.sampled, event["r"])
        self.generating, self.scoring = joined(generating), joined(scoring)


def joined(spans: Spans) -> Spans:
    """Return the spans in order, with overlapping spans merged."""
    found: Spans = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def starts(path: Path) -> list[dict[str, Any]]:
    """Return the "run" events, which begin the parts of the run; fast, because other lines are not parsed."""
    try:
        with open_regular(path) as file, mmap(file.fileno(), 0, access=ACCESS_READ) as content:
            found = list(parsed_lines(match[0] for match in _START.finditer(content)))
    except (OSError, ValueError):  # the file is missing, empty, or not a regular file
        return []
    return [one for one in found if isinstance(one.get("t"), int | float) and isinstance(one.get("start"), int)]


def bounds(path: Path) -> tuple[float, float] | None:
    """Return the first and the last time in a trace, from the two ends of the file; None if there are no events."""
    try:
        with open_regular(path) as file:
            first = next(_events(_whole_lines(file.read(_PIECE))), None)  # the first line may be empty
            file.seek(max(0, os.fstat(file.fileno()).st_size - _PIECE))
            last = list(_events(_whole_lines(file.read())))
    except OSError:  # the file is missing, or is not a regular file
        return None
    return (_start(first), max(map(_end, last))) if first and last else None


def _events(lines: bytes) -> Iterator[dict[str, Any]]:
    """Yield the events of a trace's lines; skip lines without a name, times, or a sample's rollout."""
    for event in parsed_lines(lines.splitlines()):
        times = event.get("t")
        known = times if isinstance(times, list) else [times]
        if not known or not all(isinstance(one, int | float) for one in known) or not isinstance(event.get("e"), str):
            continue
        if event["e"] != "sample" or (len(known) == 3 and isinstance(event.get("r"), int)):
            yield event


def _whole_lines(content: bytes) -> bytes:
    return content[: content.rfind(b"\n") + 1]


def _start(event: dict[str, Any]) -> float:
    time: float | list[float] = event["t"]
    return time[0] if isinstance(time, list) else time


def _end(event: dict[str, Any]) -> float:
    time: float | list[float] = event["t"]
    return time[-1] if isinstance(time, list) else time
