"""The stall report: written when a wait has passed its deadline, before anything is given up.

`RUN_DIR/stalls/<time>-<what>.txt` has the waits and stacks of this process and the last words of the others' boards.
Called by whoever keeps the deadline (`within`, `call_within`, the schedule) and by the watchdog. Without a board, in a
process that belongs to no run directory, there is no report and messages name none.
"""

from __future__ import annotations

import logging
import os
import re
import time
from pathlib import Path

from slime_core.waits.stacks import stacks
from slime_core.waits.table import Wait, current, last_progress

logger = logging.getLogger(__name__)

STALLS = "stalls"
WAITS = "waits"
_TOLD_S = 0.1
"""Seconds of waiting for a place from which on they are told."""
_MOST_REPORTS = 50
"""By one process: a run that gives up samples for days must not fill the disk."""

_home: Path | None = None
_role = ""
_written = 0


def set_home(run_dir: Path | None, role: str = "") -> None:
    """Where reports go (the board says so when it starts and stops)."""
    global _home, _role, _written
    _home, _role, _written = run_dir, role, 0


def gave_up(what: str, seconds: float | None, detail: str = "") -> str:
    """The sentence of an error about a wait that passed its deadline; writes the report that it names."""
    passed = "" if seconds is None else f" within {seconds:g} s"
    path = stall_report(what, detail)
    return f"{what}: not done{passed}{f' ({detail})' if detail else ''}{f'; waits and stacks: {path}' if path else ''}"


def stall_report(what: str, detail: str = "") -> Path | None:
    """Write one; None without a run directory, after many, or where it cannot be written (which is logged)."""
    global _written
    if _home is None or _written >= _MOST_REPORTS:
        return None
    _written += 1
    slug = re.sub(r"[^a-z0-9]+", "-", what.lower()).strip("-")[:60] or "wait"
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{_written:02d}-{slug}.txt"
    path = _home / STALLS / name
    try:
        path.parent.mkdir(exist_ok=True)
        path.write_text(_text(what, detail, _home), encoding="utf-8")
    except OSError as error:  # the report is about trouble; it must not hide it
        logger.warning("%s: no stall report: %s", what, error)
        return None
    return path


def describe(wait: Wait) -> str:
    """One line about a wait."""
    limit = "no deadline" if wait.deadline is None else f"deadline {wait.deadline:g} s"
    mark = ", OVERDUE" if wait.overdue > 0 else ""
    if wait.queued:
        mark += ", waiting for a place"
    elif wait.waited >= _TOLD_S:
        mark += f", waited {wait.waited:.1f} s for a place"
    return f"{wait.age:8.1f} s  {wait.what} ({limit}{mark}; then: {wait.then})"


def loops_of(waits: list[Wait]) -> list[object]:
    """The event loops in which somebody waits."""
    return [wait.loop for wait in waits if wait.loop is not None]


def _text(what: str, detail: str, run_dir: Path) -> str:
    waits = current()
    lines = [
        f"stalled: {what}",
        *([detail] if detail else []),
        f"process: {_role} (pid {os.getpid()}), {time.strftime('%Y-%m-%d %H:%M:%S%z')}",
        f"progress: {last_progress()}",
        "",
        "waits of this process, oldest first:",
        *(map(describe, waits) if waits else ["(none)"]),
        "",
        "other processes, as they last said:",
        *_others(run_dir),
        "",
        "stacks of this process:",
        stacks(loops_of(waits)),  # type: ignore[arg-type]
    ]
    return "\n".join(lines) + "\n"


def _others(run_dir: Path) -> list[str]:
    words = []
    for path in sorted((run_dir / WAITS).glob("*.json")):
        if not path.stem.endswith(f"-{os.getpid()}"):
            try:
                words += [f"--- {path.name}", path.read_text(encoding="utf-8")]
            except OSError as error:  # it ended while we looked
                words.append(f"--- {path.name}: {error}")
    return words or ["(none)"]
