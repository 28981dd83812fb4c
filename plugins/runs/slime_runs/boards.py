"""Read the boards of a run (`Run.waits`): which processes are alive, their waits, and their stacks on request.

Ages in a board date from its heartbeat, so the time since then is added. Clocks of other hosts may differ, so a
heartbeat from the future counts as current.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_runs.board import alive
from slime_runs.files import read_object, read_text
from slime_runs.stalls import WAITS

OLD = 30.0
"""Seconds after which a heartbeat is old: the process or its host is stalled."""
LOST = 120.0
"""Seconds after which a process of another host counts as gone."""
_POLL = 0.1


@dataclass(frozen=True, eq=False)
class Process:
    """A process of a run, as its board describes it."""

    path: Path
    board: dict[str, Any]
    state: str
    """`alive`, `silent` (apparently alive, but its heartbeat is old) or `gone`."""
    heartbeat_age: float

    @property
    def name(self) -> str:
        """`<host>-<pid>`."""
        return self.path.stem

    @property
    def silence(self) -> float:
        """Seconds to add to the ages of its waits; 0 for a process that is gone, since its waits ended with it."""
        return 0.0 if self.state == "gone" else self.heartbeat_age

    @property
    def waits(self) -> list[dict[str, Any]]:
        """Waits, oldest first; marked overdue by the time that has passed since they were written."""
        rows = []
        for row in self.board.get("waits", []):
            late = row["deadline"] is not None and row["age"] + self.silence > row["deadline"]
            rows.append({**row, "overdue": row["overdue"] or late})
        return sorted(rows, key=lambda row: -row["age"])

    @property
    def words(self) -> str:
        """The state as readable text."""
        age = f"{self.heartbeat_age:.0f} s"
        if self.state == "gone":
            return f"GONE, last heard of {age} ago"
        return f"SILENT for {age}: the process stands still, or its host does" if self.state == "silent" else "alive"


@dataclass(frozen=True)
class Report:
    """All boards of a run."""

    processes: list[Process]
    unreadable: list[Path]
    """Boards that are half-written or of another version."""

    @property
    def answering(self) -> list[Process]:
        """The processes that are not gone."""
        return [p for p in self.processes if p.state != "gone"]

    @property
    def alive(self) -> bool:
        """True if any process of the run is running."""
        return bool(self.answering)

    @property
    def overdue(self) -> bool:
        """True if a wait of a live process is past its deadline."""
        return any(row["overdue"] for p in self.answering for row in p.waits)


def read_boards(run_dir: Path) -> Report:
    """Read every board and sort the processes by oldest wait."""
    order: dict[Process, tuple[bool, float]] = {}
    unreadable = []
    for path in sorted((run_dir / WAITS).glob("*.json")):
        try:
            process = _process(path, read_object(path) or {})
            order[process] = process.state == "gone", -max((row["age"] for row in process.waits), default=0.0)
        except (AttributeError, KeyError, TypeError, ValueError):
            unreadable += [path] if path.exists() else []  # otherwise the process ended during the read
    return Report(sorted(order, key=order.__getitem__), unreadable)


_FACTS = {"role", "pid", "host"}
_FACTS_OF_WAIT = {"what", "then", "age", "deadline", "overdue", "queued", "waited", "number"}


def _process(path: Path, board: dict[str, Any]) -> Process:
    """Return the process of a board. Raises KeyError, TypeError, ValueError for a board of another version."""
    if not board.keys() >= _FACTS or not all(row.keys() >= _FACTS_OF_WAIT for row in board.get("waits", ())):
        raise KeyError("a fact that is shown")
    age = max(0.0, time.time() - board["heartbeat"])
    running = alive(board)
    gone = running is False or (running is None and age > LOST)
    return Process(path, board, "gone" if gone else "silent" if age > OLD else "alive", age)


def ask_for_stacks(processes: list[Process], deadline: float) -> dict[str, str | None]:
    """Request stacks and return them by process name; None if no answer came within `deadline` seconds."""
    question = uuid.uuid4().hex  # another process may ask at the same time
    asks = {process.name: process.path.with_suffix(f".{question}.ask") for process in processes}
    for ask in asks.values():
        ask.touch()
    answers: dict[str, str | None] = {p.name: None for p in processes}
    until = time.monotonic() + deadline
    while True:
        late = time.monotonic() > until  # read the clock before the last check, so that no answer is missed
        for process in processes:
            if answers[process.name] is None:
                answers[process.name] = _answer(asks[process.name].with_suffix(".stacks"))
        if late or None not in answers.values():
            break
        time.sleep(_POLL)
    for ask in asks.values():
        ask.unlink(missing_ok=True)
    return answers


def _answer(path: Path) -> str | None:
    if not path.is_file():
        return None
    text = read_text(path)
    path.unlink(missing_ok=True)
    return text
