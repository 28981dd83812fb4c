"""Run the small run as a user would: start it, kill it after a commit, resume it, end it by SIGTERM.

Each start is a process of its own under a guard, so nothing of it is left behind. What it prints goes to a file.
"""

from __future__ import annotations

import json
import math
import re
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slime_runs.files import file_names, parse_name, read_frames, sample_files
from slime_runs.run import Run, RunError

from slime_core.checkpoint.store import find, read_state
from slime_core.errors import CheckpointError, TrainError
from slime_core.workers.process import Guarded, python

_POLL_S = 0.05
_LOOK_S = 0.5
SLOW_S = 2.5
"""Seconds from which a call of a hook or function is reported."""
_USER_CODE = ("hook plugin", "--")
"""Beginnings of the names of such calls."""
_END_S = 60.0
"""Seconds that the resumed run gets to commit and end after SIGTERM."""
_TAIL = 12
"""Lines of output shown if there is no error line."""


@dataclass
class Outcome:
    """The end of one start of the run."""

    status: int | None
    """Exit status; None if it was killed on purpose or did not end."""
    late: str = ""
    """The deadline that was over; empty if it ended in time."""
    waits: list[str] = field(default_factory=list)
    """Waits of a run that was late."""
    error: str = ""
    """Error of the process, or the end of its output."""
    warnings: list[str] = field(default_factory=list)
    last: int | None = None
    """Rollout of the newest commit; None without a commit."""
    seconds: float = 0.0


@dataclass
class SmallRun:
    """The small run."""

    config: Path
    directory: Path
    command: str
    environment: Mapping[str, str]
    slow: dict[str, float] = field(default_factory=dict)
    """Function of the user's -> the longest time that a call of it was seen to take, in seconds."""

    def until_commit(self, seconds: float, *, more: bool = False, load: bool = False) -> Outcome:
        """Run until a commit is there.

        Args:
            seconds: Time until it is ended.
            more: Wait for a later commit than the newest, and end the run by SIGTERM; otherwise SIGKILL.
            load: Resume from the newest commit.
        """
        began = time.monotonic()
        log = self.directory.parent / f"output-{'resumed' if load else 'first'}.txt"
        argv = [*python(), "-m", "slime_core", self.command, "--config", str(self.config)]
        argv += ["--load", str(self.directory)] if load else []
        before = self.newest()
        process = Guarded("the rehearsed run", stop_s=5.0, leftover_s=1.0, log=log, error=TrainError)
        process.start(argv, self.environment)
        try:
            status = self._wait(process, began + seconds, lambda: self._is_there(before))
            late = (
                "" if status is not None or self._is_there(before) else f"not done within {seconds:.0f} s (--seconds)"
            )
            waits = self._waits() if late else []
            if status is None and not late:
                process.signal(signal.SIGTERM if more else signal.SIGKILL)
                status = process.wait(_END_S)
                late = "" if status is not None else f"not ended {_END_S:.0f} s after SIGTERM"
                status = None if status == 128 + signal.SIGKILL and not more else status
        finally:
            process.kill()
        text = log.read_bytes()[process.begin :].decode(errors="replace")
        error = _error(text) if status not in (0, None) or late else ""
        return Outcome(status, late, waits, error, _warnings(text), self.newest(), time.monotonic() - began)

    def newest(self) -> int | None:
        """Return the rollout of the newest commit; None without one."""
        try:
            commit = find(self.directory)
        except CheckpointError:
            return None
        return None if commit is None else int(read_state(commit)["rollout_id"])

    def metrics(self) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl."""
        path = self.directory / "metrics.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        return [json.loads(line) for line in lines if line.strip().endswith("}")]

    def incidents(self) -> list[str]:
        """Return what the run has noticed in its numbers, in words; a kill may have torn the last record."""
        return [f"{one['cause']}: {one['numbers']}" for one in Run(self.directory).incidents()]

    def failure(self, share: float) -> str:
        """Return the share of samples that failed, with the first failure."""
        for path in sample_files(self.directory / "samples"):
            for sample in (row for _, rows in read_frames(path) for row in rows):
                if failure := sample.get("metadata", {}).get("failure"):
                    return f"{share:.0%} of the samples failed: {failure['where']}: {failure['error']}"
        return f"{share:.0%} of the samples failed"

    def stage(self) -> str:
        """Return the stage in which a run without a commit ended, by the records that are there."""
        steps = [line["step"] for line in self.metrics()]
        if any(steps):
            return "commit"
        kept = [parse_name(name) for name in file_names(self.directory / "samples")]
        if any(found is not None and not found[1] for found in kept):
            return "train"
        trace = self.directory / "trace.jsonl"
        return "generate" if steps or (trace.is_file() and trace.stat().st_size) else "start"

    def _is_there(self, before: int | None) -> bool:
        newest = self.newest()
        return newest is not None and (before is None or newest > before)

    def _wait(self, process: Guarded, until: float, there: Callable[[], bool]) -> int | None:
        looked = time.monotonic()
        while time.monotonic() < until:
            status = process.wait(_POLL_S)
            if status is not None:
                return status
            if there():
                return None
            if time.monotonic() - looked > _LOOK_S:
                looked = time.monotonic()
                self._note_slow()
        return None

    def _note_slow(self) -> None:
        for what, age in self._rows():
            if age > SLOW_S and what.startswith(_USER_CODE):
                self.slow[what] = max(age, self.slow.get(what, 0.0))

    def _rows(self) -> list[tuple[str, float]]:
        """Return the waits of all processes, each with its age in seconds."""
        try:
            processes = Run(self.directory).waits().processes
        except RunError:  # nothing is written yet
            return []
        return [(row["what"], row["age"] + process.silence) for process in processes for row in process.waits]

    def _waits(self) -> list[str]:
        return [f"{what} for {age:.0f} s" for what, age in self._rows()]


def _error(text: str) -> str:
    """Return the error that a command printed, with its further lines; else the end of its output."""
    lines = text.rstrip().splitlines()
    starts = [number for number, line in enumerate(lines) if re.match(r"slime: error: |\w*Error: ", line)]
    if starts:
        return "\n".join(lines[starts[-1] : starts[-1] + _TAIL]).removeprefix("slime: error: ")
    return "\n".join(lines[-_TAIL:])


def _warnings(text: str) -> list[str]:
    found = re.findall(r"^slime: warning: (.*)$", text, re.MULTILINE)
    return list(dict.fromkeys(found))


def not_finite(metrics: list[dict[str, Any]]) -> list[str]:
    """Return the names of metrics that are not finite."""
    return sorted(
        {name for line in metrics for name, x in line.items() if isinstance(x, float) and not math.isfinite(x)}
    )
