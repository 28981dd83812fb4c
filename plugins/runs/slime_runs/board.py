"""The board: a daemon thread that publishes this process's waits below the run directory, for `slime why`.

    RUN_DIR/waits/<host>-<pid>.json     the waits; rewritten on change and as a heartbeat, removed at a clean end
    RUN_DIR/waits/<host>-<pid>.ask      request of `slime why --stacks` (from any node)
    RUN_DIR/waits/<host>-<pid>.stacks   answer of the board, which begins with the text of the request

`slime_core.waits.published` starts the board of each process of a run. If a process dies, its files stay; readers
(`boards.py`) detect the death by the heartbeat and, on the same host, by the pid.
"""

from __future__ import annotations

import glob
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slime_core.files import replace_file
from slime_core.waits.table import Wait, current, last_progress
from slime_runs.processes import birth
from slime_runs.stacks import BOARD, stacks
from slime_runs.stalls import WAITS, loops_of, set_home

logger = logging.getLogger(__name__)

HEARTBEAT = 5.0
"""Seconds between writes when nothing changes."""
_TICK = 0.5
_BETWEEN = 1.0
"""Seconds between writes when everything changes."""
_MOST_ROWS = 100


class Board:
    """The board of a process. Call `start`, then `stop`, from any thread."""

    def __init__(self, run_dir: Path, role: str) -> None:
        self.run_dir = run_dir
        self.role = role
        self.path = run_dir / WAITS / f"{_host()}-{os.getpid()}.json"
        self._started = time.time()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name=BOARD, daemon=True)
        self._pid = os.getpid()
        self._signature: Any = None
        self._written = float("-inf")
        self._failed = False

    def start(self) -> None:
        """Start to publish."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _sweep(self.path.parent)
        self._publish()
        self._thread.start()

    def stop(self) -> None:
        """Stop publishing, and remove what was published; safe to call twice."""
        if os.getpid() != self._pid:  # a forked child has neither the thread nor a right to the files
            return
        self._end.set()
        if self._thread.is_alive():
            self._thread.join(HEARTBEAT)
        _remove(self.path)

    # -- the thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._end.wait(_TICK):
            try:
                self._turn()
            except OSError as error:  # a full disk ends the run elsewhere, with a better message
                if not self._failed:
                    logger.warning("waits are not published: %s", error)
                self._failed = True

    def _turn(self) -> None:
        signature = self._sign()
        age = time.monotonic() - self._written
        if age >= HEARTBEAT or (signature != self._signature and age >= _BETWEEN):
            self._publish()
        for ask in self.path.parent.glob(f"{glob.escape(self.path.stem)}.*.ask"):
            ask.unlink(missing_ok=True)
            self._publish()
            replace_file(ask.with_suffix(".stacks"), stacks(loops_of(current())).encode())

    def _sign(self) -> Any:
        return frozenset(wait.what for wait in current()), tuple(last_progress().items())

    def _publish(self) -> None:
        self.path.parent.mkdir(exist_ok=True)  # not a run directory that has been moved away
        self._signature, self._written = self._sign(), time.monotonic()
        replace_file(self.path, f"{json.dumps(self.describe(), default=str)}\n".encode())

    def describe(self) -> dict[str, Any]:
        """Return the published mapping. Times are seconds since the epoch; ages and deadlines are seconds."""
        waits = rows(current())
        return {
            "role": self.role,
            "host": _host(),
            "pid": os.getpid(),
            "birth": birth(os.getpid()),
            "command": sys.argv,
            "started": self._started,
            "heartbeat": time.time(),
            "every": HEARTBEAT,
            "progress": last_progress(),
            "waits": waits[:_MOST_ROWS],
            "left_off": max(0, len(waits) - _MOST_ROWS),
        }


def rows(waits: list[Wait]) -> list[dict[str, Any]]:
    """Return waits as JSON, oldest first; equal waits share a row with their number and the age of the oldest."""
    found: dict[Any, dict[str, Any]] = {}
    now = time.monotonic()  # read once: otherwise a younger wait could look older
    for wait in waits:
        key = (wait.what, wait.then, wait.deadline, wait.queued)
        row = found.setdefault(
            key,
            {
                "what": wait.what, "age": round(now - wait.since, 3), "deadline": wait.deadline, "then": wait.then,
                "overdue": wait.overdue > 0, "queued": wait.queued, "waited": round(wait.waited, 1),
                "in": "task" if wait.loop else "thread", "number": 0,
            },
        )  # fmt: skip
        row["number"] += 1
    return list(found.values())


def alive(board: dict[str, Any]) -> bool | None:
    """Return whether the process of a board runs; None if only its heartbeat can tell (another host)."""
    if board.get("host") != _host():
        return None
    pid = int(board["pid"])
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's, so it exists
        pass
    return not board.get("birth") or birth(pid) == board["birth"]


def _sweep(directory: Path) -> None:
    """Remove boards of processes of this host that are gone: those of a run that was killed before."""
    for path in directory.glob("*.json"):
        try:
            dead = alive(json.loads(path.read_text(encoding="utf-8"))) is False
        except (OSError, ValueError):
            continue
        if dead:
            _remove(path)


def remove_board(run_dir: Path, host: str, pid: int) -> None:
    """Remove the board of a process that was killed after its work was done."""
    _remove(run_dir / WAITS / f"{_as_file(host)}-{pid}.json")


def _remove(path: Path) -> None:
    name = glob.escape(path.stem)
    for file in (*path.parent.glob(f"{name}.*"), *path.parent.glob(f".{name}.*.partial")):
        file.unlink(missing_ok=True)


def _host() -> str:
    return _as_file(socket.gethostname())


def _as_file(host: str) -> str:
    return host.replace("/", "_") or "localhost"


_board: Board | None = None


def start_board(run_dir: Path | str, role: str) -> Board:
    """Publish this process's waits below `run_dir` as `role` ("rank 0", "rollout"), in place of an earlier board."""
    global _board
    if _board is not None:
        stop_board()
    set_home(Path(run_dir), role)
    _board = Board(Path(run_dir), role)
    _board.start()
    return _board


def stop_board() -> None:
    """Stop publishing; do nothing without a board."""
    global _board
    board, _board = _board, None
    if board is not None:
        board.stop()
        set_home(None)


@contextmanager
def published(run_dir: Path, role: str) -> Iterator[None]:
    """Publish until the end of the block; the entry point of `slime.boards`."""
    start_board(run_dir, role)
    try:
        yield
    finally:
        stop_board()


def _in_child() -> None:
    """Disable the board in a forked child, which has no waits and is not the run."""
    global _board
    _board = None
    set_home(None)


os.register_at_fork(after_in_child=_in_child)
