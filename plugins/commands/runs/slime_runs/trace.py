"""What `trace.jsonl` says of one rollout, without reading the rest: pieces of the file, and what each is about.

A reader that is asked often keeps one `TraceIndex`; it reads what was appended, and starts over where the file was
replaced.
"""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_core.observability.timeline import BUSY
from slime_runs.files import parsed_lines

_PIECE = 64 << 10
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
        self._pieces: list[_Piece] = []
        self._inode = 0
        self._lock = threading.Lock()

    def events(self, rollout: int) -> list[dict[str, Any]]:
        """Those of a rollout, and of those that name none (pushes, saves) what began meanwhile or right after."""
        self.update()
        if not (pieces := self._pieces):
            return []
        found: list[dict[str, Any]] = []
        with self.path.open("rb") as file:
            for piece in pieces:
                if rollout in piece.rollouts:
                    file.seek(piece.start)
                    found += parsed_lines(file.read(piece.size).splitlines())
        own = [event for event in found if event.get("r") == rollout]
        if not own:
            return []
        start, end = min(_start(event) for event in own), max(event["t"][-1] for event in own)
        end += (end - start) / 10
        nameless = [e for e in found if "r" not in e and e["e"] not in ("run", *BUSY) and start <= _start(e) <= end]
        return sorted([*own, *nameless], key=_start)

    def update(self) -> None:
        """Read what was appended; of a long trace that nobody has asked of yet it takes a fifth of a second."""
        with self._lock:
            if self.path.is_file():
                self._read_on()

    def _read_on(self) -> None:
        state = self.path.stat()
        read = self._pieces[-1].start + self._pieces[-1].size if self._pieces else 0
        if state.st_ino != self._inode or state.st_size < read:
            self._pieces, self._inode, read = [], state.st_ino, 0
        with self.path.open("rb") as file:
            file.seek(read)
            while lines := _whole_lines(file.read(_PIECE)):
                self._pieces.append(_Piece(read, len(lines), frozenset(map(int, set(_ROLLOUT.findall(lines))))))
                read += len(lines)
                file.seek(read)


def _whole_lines(content: bytes) -> bytes:
    return content[: content.rfind(b"\n") + 1]


def _start(event: dict[str, Any]) -> float:
    time: float | list[float] = event["t"]
    return time[0] if isinstance(time, list) else time
