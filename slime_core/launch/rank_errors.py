"""From the error of a rank to the error of the command: which of several failed first, and what it said.

The ranks `report`; the process that started them (`launch/ranks.py`) asks for the `first_error`. The report lies where
torch's elastic agent looks for it, so torchrun shows it as well. What a reader would get wrong: a rank killed by a
signal reports nothing, and its peers then report broken connections; so a rank without a report goes first.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime_core import errors
from slime_core.errors import SlimeError, TrainError

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
    shown = "".join(traceback.format_exception(error))
    path = os.environ.get(ERROR_FILE)
    if not path:
        print(shown, file=sys.stderr, flush=True)
        return
    known = isinstance(error, SlimeError) and hasattr(errors, type(error).__name__)
    found = {
        "message": f"{type(error).__name__}: {error}",
        "timestamp": int(time.time()),
        "time": time.time(),
        "kind": type(error).__name__ if known else None,
        "text": str(error),
        "traceback": None if isinstance(error, SlimeError) else shown,
    }
    part = Path(f"{path}.part")
    part.write_text(json.dumps(found), encoding="utf-8")
    part.replace(path)  # the agent may read it at this moment, since another rank has failed


def first_error(failures: Mapping[int, Any], count: int, folder: Path, grace: float) -> SlimeError:
    """What to raise when ranks have failed; prints the traceback of an unexpected error.

    Args:
        failures: Rank -> torch's `ProcessFailure`.
        count: Number of ranks.
        folder: With their output.
        grace: Seconds after which the agent kills ranks that do not end.
    """
    reports = {rank: found for rank, failure in failures.items() if (found := _report_of(failure))}
    silent = [
        rank for rank, failure in failures.items() if rank not in reports and not _was_asked(failure, reports, grace)
    ]
    if not silent and reports:
        rank = min(reports, key=lambda number: reports[number]["time"])
        return _reported(reports[rank], f"rank {rank} of {count}")
    rank = min(silent or failures)
    return _silent(failures[rank], rank, count, folder)


def _report_of(failure: Any) -> dict[str, Any] | None:
    found: dict[str, Any] = failure.error_file_data
    return found if "kind" in found else None


def _was_asked(failure: Any, reports: Mapping[int, Any], grace: float) -> bool:
    """It ended because another one had failed."""
    if failure.exitcode in (-signal.SIGTERM, ASKED_TO_END):
        return True
    earliest = min((found["time"] for found in reports.values()), default=time.time())
    return bool(failure.exitcode == -signal.SIGKILL and time.time() - earliest >= grace)


def _reported(found: dict[str, Any], whose: str) -> SlimeError:
    if found["traceback"]:
        print(found["traceback"], file=sys.stderr, flush=True)
        return TrainError(f"{whose} failed: {found['message']}")
    kind: type[SlimeError] = getattr(errors, found["kind"] or "TrainError")
    return kind(f"{whose}: {found['text']}")


def _silent(failure: Any, rank: int, count: int, folder: Path) -> SlimeError:
    code = failure.exitcode
    if code >= 0:
        ended = f"ended with exit status {code}"
    else:
        ended = f"was killed by {signal.Signals(-code).name}"
        if code == -signal.SIGKILL:
            ended += ", by the system if memory ran out"
    return TrainError(f"rank {rank} of {count} (process {failure.pid}) {ended}{_tail(rank, folder)}")


def _tail(rank: int, folder: Path) -> str:
    """The end of its output; rank 0's has been seen."""
    logs = sorted(folder.glob(f"*/attempt_*/{rank}/stderr.log"), key=lambda path: path.stat().st_mtime)
    if not logs:
        return ""
    lines = logs[-1].read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:]
    return "\n".join([f"; {logs[-1]} ends with", *lines]) if lines else f"; {logs[-1]} is empty"
