"""What `trace.jsonl` says of one rollout, without reading the rest, and of a run: stages, and when samples were busy.

A reader that is asked often keeps one `TraceIndex`; it reads what was appended, and starts over where the file was
replaced.
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

from slime_core.data.ledger_files import open_regular
from slime_runs.files import parsed_lines

Spans = list[tuple[float, float]]
_PIECE = 64 << 10
_START = re.compile(rb'\{"e":"run".*\n')
"""No text in an event looks so, as JSON writes quotes otherwise; to look for starts of lines takes 15 times as long."""
_ROLLOUT = re.compile(rb'"r":(\d+)')


@dataclass(frozen=True)
class _Piece:
    start: int
    size: int
    rollouts: frozenset[int]


class TraceIndex:
    """Which rollouts each piece of a trace is about. Any thread may ask."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stages: list[dict[str, Any]] = []
        """Events that are of no sample, as far as `update` has come."""
        self.generating: Spans = []
        """When any sample was, evaluations aside; in order, without overlaps."""
        self.scoring: Spans = []
        self.sampled = -1
        """The last rollout with a sample in it: a long timeline has no more of them."""
        self._pieces: list[_Piece] = []
        self._inode = 0
        self._lock = threading.Lock()

    def events(self, rollout: int) -> list[dict[str, Any]]:
        """Those of a rollout, and of those that name none (pushes, saves) what began meanwhile or right after."""
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
        """Read what was appended; of a long trace that nobody has asked of yet it takes a few seconds."""
        with self._lock:
            while self._read_on():
                pass

    def update_beside(self) -> None:
        """The same on a thread beside others that answer: it pauses three times as long as it reads."""
        more = True
        while more:
            began = time.monotonic()
            with self._lock:
                more = self._read_on()
            time.sleep(3 * (time.monotonic() - began))

    def _read_on(self) -> bool:
        """The next piece; False where there is none."""
        try:
            with open_regular(self.path) as file:
                return self._read_piece(file)
        except OSError:  # there is none, or it is no file of a run
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
    """In order, those that overlap as one."""
    found: Spans = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def starts(path: Path) -> list[dict[str, Any]]:
    """The events with which parts of the run begin; quick, as little else is read."""
    try:
        with open_regular(path) as file, mmap(file.fileno(), 0, access=ACCESS_READ) as content:
            found = list(parsed_lines(match[0] for match in _START.finditer(content)))
    except (OSError, ValueError):  # there is none, it is empty, or no file of a run
        return []
    return [one for one in found if isinstance(one.get("t"), int | float) and isinstance(one.get("start"), int)]


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
