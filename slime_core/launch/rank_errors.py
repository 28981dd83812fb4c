"""Turn the errors of ranks into the error of the command: the error of the rank that failed first.

Each rank calls `report`; the process that started the ranks (`launch/ranks.py`) calls `first_error`. The report is
written where torch's elastic agent reads it, so torchrun shows it as well. A rank killed by a signal writes no report,
and its peers then report broken connections; so a rank without a report takes precedence.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_core import errors
from slime_core.errors import SlimeError, TrainError
from slime_core.text import plain
from slime_core.workers.process import Guarded, signal_of

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Environment variable of torch's elastic agent."""
ASKED_TO_END = 128 + signal.SIGTERM
"""Exit status of a rank that ended on SIGTERM."""
TAIL_LINES = 20
"""Number of output lines shown for a rank that ended without a report."""
_REPORTED = "_slime_reported"
"""Attribute that `report` sets on an error that it has reported."""


def report(error: Exception) -> None:
    """Write the error for the process that started this rank, or print it if no process reads reports.

    Call it before anything is closed: closing makes the peers fail at once, and they would report first. An error is
    reported once.
    """
    if getattr(error, _REPORTED, False):
        return
    setattr(error, _REPORTED, True)
    whole = "".join(traceback.format_exception(error))
    path = os.environ.get(ERROR_FILE)
    if not path:
        print(plain(whole), file=sys.stderr, flush=True)
        return
    known = isinstance(error, SlimeError) and hasattr(errors, type(error).__name__)
    found = {
        "message": f"{type(error).__name__}: {error}",
        "timestamp": int(time.time()),
        "time": time.time(),
        "kind": type(error).__name__ if known else None,
        "text": str(error),
        "traceback": None if isinstance(error, SlimeError) else whole,
    }
    part = Path(f"{path}.part")
    part.write_text(json.dumps(found), encoding="utf-8")
    part.replace(path)  # atomic: the agent may be reading the report now, if another rank has failed


@dataclass(frozen=True)
class RankEnd:
    """The end of a rank: exit status, error report and output."""

    status: int
    """Exit status; 128 plus the signal number for a rank killed by a signal."""
    pid: int
    report: dict[str, Any] | None = None
    """Error report that the rank wrote."""
    log: Path | None = None
    """File with the rank's output; None if the rank prints to the command's output."""
    begin: int = 0
    """Byte of the log at which the rank's output begins."""

    @classmethod
    def of(cls, rank: Guarded, error_file: Path) -> RankEnd:
        """Build from a process that has ended."""
        found = json.loads(error_file.read_text(encoding="utf-8")) if error_file.exists() else {}
        return cls(rank.poll() or 0, rank.child, found if "kind" in found else None, rank.log, rank.begin)


def first_error(failures: Mapping[int, RankEnd], count: int, grace: float) -> SlimeError:
    """Return the error to raise when ranks have failed; print the traceback of an unexpected error.

    Args:
        failures: Rank -> how it ended.
        count: Number of ranks.
        grace: Seconds after which ranks that do not end are killed.
    """
    reports = {rank: failure.report for rank, failure in failures.items() if failure.report}
    silent = [
        rank for rank, failure in failures.items() if rank not in reports and not _was_asked(failure, reports, grace)
    ]
    if not silent and reports:
        rank = min(reports, key=lambda number: reports[number]["time"])
        return _reported(reports[rank], f"rank {rank} of {count}")
    rank = min(silent or failures)
    return _silent(failures[rank], f"rank {rank} of {count}")


def _was_asked(failure: RankEnd, reports: Mapping[int, Any], grace: float) -> bool:
    """Return True if the rank ended because another rank had failed."""
    if failure.status == ASKED_TO_END:
        return True
    earliest = min((found["time"] for found in reports.values()), default=time.time())
    return failure.status == 128 + signal.SIGKILL and time.time() - earliest >= grace


def _reported(found: dict[str, Any], whose: str) -> SlimeError:
    if found["traceback"]:
        print(plain(found["traceback"]), file=sys.stderr, flush=True)
        return TrainError(f"{whose} failed: {found['message']}")
    kind: type[SlimeError] = getattr(errors, found["kind"] or "TrainError")
    return kind(f"{whose}: {found['text']}")


def _silent(failure: RankEnd, whose: str) -> SlimeError:
    number = signal_of(failure.status)
    if number is None:
        ended = f"ended with exit status {failure.status}"
    else:
        ended = f"was killed by {number.name}"
        if number == signal.SIGKILL:
            ended += ", by the system if memory ran out"
    return TrainError(f"{whose} (process {failure.pid}) {ended}{_tail(failure)}")


def _tail(failure: RankEnd) -> str:
    """Return the end of the rank's output; empty for rank 0, whose output is on the terminal."""
    if failure.log is None:
        return ""
    lines = failure.log.read_bytes()[failure.begin :].decode(errors="replace").splitlines()[-TAIL_LINES:]
    return "\n".join([f"; {failure.log} ends with", *lines]) if lines else f"; {failure.log} is empty"
