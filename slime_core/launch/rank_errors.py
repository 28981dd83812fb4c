"""From the error of a rank to the error of the command: which of several failed first, and what it said.

The ranks `report`; the process that started them (`launch/ranks.py`) asks for the `first_error`. The report lies where
torch's elastic agent looks for it, so torchrun shows it as well. A rank killed by a signal reports nothing, and its
peers then report broken connections; so a rank without a report goes first.
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
from slime_core.procs.guarded import Guarded, signal_of
from slime_core.text import plain

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Environment variable of torch's elastic agent."""
ASKED_TO_END = 128 + signal.SIGTERM
"""Exit status of a rank that ended because it was told to."""
TAIL_LINES = 20
"""Of the output of a rank that ended without a word."""
_REPORTED = "_slime_reported"
"""Attribute of an error that `report` has seen."""


def report(error: Exception) -> None:
    """Leave the error for the process that started this rank; printed here when nobody reads it.

    Call it before anything is closed: peers fail of that at once, and would report first. Once per error.
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
    part.replace(path)  # the agent may read it at this moment, since another rank has failed


@dataclass(frozen=True)
class RankEnd:
    """How a rank ended."""

    status: int
    """Exit status; 128 and the number of the signal that killed it."""
    pid: int
    report: dict[str, Any] | None = None
    """What it has left of its error."""
    log: Path | None = None
    """With its output; None: that is the command's."""
    begin: int = 0
    """Byte of the log at which its output begins."""

    @classmethod
    def of(cls, rank: Guarded, error_file: Path) -> RankEnd:
        """Of a process that has ended."""
        found = json.loads(error_file.read_text(encoding="utf-8")) if error_file.exists() else {}
        return cls(rank.poll() or 0, rank.child, found if "kind" in found else None, rank.log, rank.begin)


def first_error(failures: Mapping[int, RankEnd], count: int, grace: float) -> SlimeError:
    """What to raise when ranks have failed; prints the traceback of an unexpected error.

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
    """It ended because another one had failed."""
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
    """The end of its output; rank 0's has been seen."""
    if failure.log is None:
        return ""
    lines = failure.log.read_bytes()[failure.begin :].decode(errors="replace").splitlines()[-TAIL_LINES:]
    return "\n".join([f"; {failure.log} ends with", *lines]) if lines else f"; {failure.log} is empty"
