"""The stall report, written when a wait has passed its deadline and before the wait is abandoned.

`RUN_DIR/stalls/<time>-<what>.txt` has the waits and stacks of this process and the last state of other processes'
boards. `slime_core.waits.gave_up` calls `stall_report`. A process without a board, which belongs to no run directory,
writes no report, and its messages name none.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
from pathlib import Path

from slime_core.waits import report_by
from slime_core.waits.table import Wait, current, last_progress
from slime_runs.stacks import stacks

logger = logging.getLogger(__name__)

STALLS = "stalls"
WAITS = "waits"
_TOLD_S = 0.1
"""Shortest wait for a place, in seconds, that a report mentions."""
_MOST_REPORTS = 50
"""Largest number of reports per process: a run that abandons samples for days must not fill the disk."""

_home: Path | None = None
_role = ""
_written = 0


def set_home(run_dir: Path | None, role: str = "") -> None:
    """Set the run directory for reports; the board calls this when it starts and stops."""
    global _home, _role, _written
    _home, _role, _written = run_dir, role, 0
    report_by(None if run_dir is None else stall_report)


def stall_report(what: str, detail: str = "") -> Path | None:
    """Write a report and return its path.

    Return None without a run directory, after `_MOST_REPORTS` reports, or if the write fails (which is logged).
    """
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
    except OSError as error:  # the report describes a problem and must not hide it
        logger.warning("%s: no stall report: %s", what, error)
        return None
    return path


def describe(wait: Wait) -> str:
    """Return a line that describes a wait."""
    limit = "no deadline" if wait.deadline is None else f"deadline {wait.deadline:g} s"
    mark = ", OVERDUE" if wait.overdue > 0 else ""
    if wait.queued:
        mark += ", waiting for a place"
    elif wait.waited >= _TOLD_S:
        mark += f", waited {wait.waited:.1f} s for a place"
    return f"{wait.age:8.1f} s  {wait.what} ({limit}{mark}; then: {wait.then})"


def loops_of(waits: list[Wait]) -> list[asyncio.AbstractEventLoop]:
    """Return the event loops of the waits."""
    return [wait.loop for wait in waits if isinstance(wait.loop, asyncio.AbstractEventLoop)]


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
        stacks(loops_of(waits)),
    ]
    return "\n".join(lines) + "\n"


def _others(run_dir: Path) -> list[str]:
    words = []
    for path in sorted((run_dir / WAITS).glob("*.json")):
        if not path.stem.endswith(f"-{os.getpid()}"):
            try:
                words += [f"--- {path.name}", path.read_text(encoding="utf-8")]
            except OSError as error:  # the process ended meanwhile
                words.append(f"--- {path.name}: {error}")
    return words or ["(none)"]
