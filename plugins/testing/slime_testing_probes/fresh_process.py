"""The run's components once more in an interpreter that knows nothing of this one: do they load there, and answer?

The other end of `probes.py`. A component that hangs or ends its process takes only that process with it; another one
goes on with the rest.
"""

from __future__ import annotations

import base64
import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from slime_rewards.processes.messages import pack_args

from slime_core.distributions import is_own
from slime_core.estimator import estimator_class
from slime_core.launch.prepare import Prepared
from slime_core.plugins.registry import Resolved
from slime_core.plugins.resolve import absolute_spec
from slime_core.protocols.command import Finding, Level
from slime_core.sample import Sample
from slime_core.workers.process import Guarded, signal_of
from slime_testing_probes.probes import ON_ROWS

LOAD_DEADLINE = 300.0
"""Seconds that importing one component in a fresh process may take; from a cold network disk it takes minutes."""
_MOST_SENT = 16 << 20
CALL_DEADLINE = 2.0
"""Seconds one call may take before it counts as hanging."""
_BOOT = "import sys; sys.path[:] = {path!r}; from slime_testing_probes.probes import main; main({descriptor})"


def _needs_parts(resolved: Resolved) -> bool:
    """Return whether it is an estimator that needs the parts of a reward."""
    kind, label = resolved.kind, resolved.ref.label
    return kind == "estimators" and estimator_class(resolved.obj, label).needs_components


class FreshProcess:
    """Loads and calls the run's components elsewhere; started again without a component that hangs or kills it."""

    def __init__(self, run: Prepared) -> None:
        self._run = run
        first = {(a.kind, a.spec): a for a in reversed(run.resolver.used)}
        # Of slime's own plugins only those that depend on the data are called: the rest loads as it did here.
        self._asked: list[Resolved] = [
            a for a in reversed(first.values())
            if a.kind in ON_ROWS or _needs_parts(a) or not is_own(a.ref.distribution)
        ]  # fmt: skip
        self._skip: set[int] = set()
        self._rows: list[tuple[str, str | None, Sample]] = []
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # no name, so that a kill leaves nothing behind
        self._process, self._events = self._start()

    def _start(self) -> tuple[Guarded, int]:
        ours, theirs = os.pipe()
        boot = _BOOT.format(path=sys.path, descriptor=theirs)
        process = Guarded("a fresh process", stop_s=0.0, leftover_s=0.0, log=Path("/dev/fd", str(self._log.fileno())))
        process.start([sys.executable, "-P", "-c", boot], stdin=subprocess.PIPE, only=[theirs])
        os.close(theirs)
        return process, ours

    def begin(self, rows: Sequence[tuple[str, str | None, Sample]]) -> None:
        """Send the order, with as many rows as 16 MiB hold.

        `rows`: (place, spec of the reward that scores it, sample) of the data; none where none can be read.
        """
        self._rows = list(rows)
        sent, size = [], 0
        for place, spec, sample in rows:
            row: dict[str, Any] = {"place": place, "spec": spec and absolute_spec(spec), "prompt": sample.prompt}
            row |= {"label": sample.label, "metadata": sample.metadata}
            size += len(json.dumps(row, default=str))
            if size > _MOST_SENT:
                break
            sent.append(row)
        order = {
            "args": base64.b64encode(pack_args(self._run.args)).decode(),
            "components": [
                {"kind": a.kind, "spec": a.spec, "origin": f"in a fresh process, {a.origin}"} for a in self._asked
            ],
            "skip": sorted(self._skip),
            "rows": sent,
        }
        try:
            self._process.stdin.write(json.dumps(order, default=str).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has died; the events say so

    def findings(self) -> Iterator[Finding]:
        """Yield what became of each component; OK lines for those without trouble are summed up in one."""
        bad: set[int] = set()
        while True:
            number, event = -1, "start"
            for report in self._reports():
                event, number = report["event"], report.get("number", number)
                if event in _TROUBLE:
                    bad.add(number)
                    yield self._finding(number, _TROUBLE[event], report["message"])
                if event == "done":
                    break
            if event == "done":
                break
            ended = self._end()
            bad.add(number)
            hangs = "no answer" in ended[0] and event == "call"
            yield self._finding(number, Level.WARNING if hangs else Level.ERROR, ended[event != "call"])
            if event != "call":
                return
            self._skip |= {number, *bad}
            self._process, self._events = self._start()
            self.begin(self._rows)
        fine = [a.spec for i, a in enumerate(self._asked) if i not in bad]
        yield Finding("components", Level.OK, f"{len(fine)} work in a fresh process: {', '.join(fine)}")

    def _reports(self) -> Iterator[dict[str, Any]]:
        """Events as they come; ends early when none comes in time or the process dies."""
        buffered, limit = b"", LOAD_DEADLINE
        while True:
            ready, _, _ = select.select([self._events], [], [], limit)
            if not ready:
                return
            data = os.read(self._events, 1 << 16)
            if not data:  # it has ended, or is about to
                self._process.wait(limit)
                return
            *lines, buffered = (buffered + data).split(b"\n")
            for line in lines:
                report = json.loads(line)
                limit = CALL_DEADLINE if report["event"] == "call" else LOAD_DEADLINE
                yield report

    def _end(self) -> tuple[str, str]:
        """Kill what is left; how it ended during a call, and otherwise."""
        status = self._process.poll()
        self.close(log=False)
        if status is None:
            return f"no answer within {CALL_DEADLINE:.0f} s", f"not loaded within {LOAD_DEADLINE:.0f} s"
        number = signal_of(status)
        how = f"with exit status {status}" if number is None else f"by signal {number.name}"
        self._log.seek(self._process.begin)
        written = self._log.read()
        tail = written[-400:].decode(errors="replace").strip().splitlines()
        return f"ended the process {how}", f"the fresh process ended {how}{': ' + tail[-1] if tail else ''}"

    def _finding(self, number: int, level: Level, message: str) -> Finding:
        where = f"{self._asked[number].origin} {self._asked[number].spec!r}: " if number >= 0 else ""
        return Finding("components", level, message if "in a fresh process" in message else where + message)

    def close(self, *, log: bool = True) -> None:
        """Kill the process and whatever it started."""
        self._process.kill()
        self._process.stdin.close()
        if self._events >= 0:
            os.close(self._events)
            self._events = -1
        if log:
            self._log.close()


_TROUBLE = {"broken": Level.ERROR, "wrong": Level.ERROR, "failed": Level.ERROR, "raised": Level.WARNING}
