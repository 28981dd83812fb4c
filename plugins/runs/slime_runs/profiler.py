"""`slime train --profile`: the passes of every trainer process are recorded too, and all of it is written for Perfetto.

Trainer processes append to the run's timeline, as the loop does. The process that leads the run converts the timeline
to `profile/trace.json` after every rollout, so a killed run has a trace, too, and prints the table at the end.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slime_core import Args, hookimpl
from slime_runs import profile
from slime_runs.perfetto import Trace
from slime_runs.run import PROFILE, Run
from slime_runs.timeline import FILE, open_timeline

logger = logging.getLogger(__name__)


class Profiler:
    """The hooks of one process."""

    def __init__(self) -> None:
        self._run_dir: Path | None = None
        self._trace: Trace | None = None

    @hookimpl
    def slime_run_start(self, args: Args, run_dir: Path) -> None:
        """Open the trace in the process that leads the run."""
        if args.profile:
            self._run_dir = run_dir
            with self._kept_going():
                self._trace = Trace(run_dir / FILE, run_dir / PROFILE)

    @hookimpl
    def slime_rollout_trained(self, args: Args, trained: Any) -> None:
        """Append this process's spans of the rollout to the timeline."""
        if not args.profile:
            return
        timeline, facts = open_timeline(args), {"r": trained.batch.rollout_id, "rank": trained.trainer.rank}
        shift = timeline.now() - time.perf_counter()
        for name, start, end in trained.spans:
            timeline.span(name, start + shift, end + shift, **facts)

    @hookimpl
    def slime_step_end(self) -> None:
        """Update the trace, so that a killed run has it up to this step."""
        with self._kept_going():
            if self._trace is not None:
                self._trace.update()

    @hookimpl
    def slime_run_end(self, error: BaseException | None) -> None:
        """Complete the trace, and print the table."""
        with self._kept_going():
            if self._trace is not None:
                self._trace.close()
        run_dir, self._run_dir, self._trace = self._run_dir, None, None
        if run_dir is not None:
            spent = profile.lines(profile.profile(Run(run_dir)))
            print("\n".join(["", *spent, f"for Perfetto: {run_dir / PROFILE}", ""]), flush=True)

    @contextmanager
    def _kept_going(self) -> Iterator[None]:
        """Give up the trace, and continue the run, if the disk is full."""
        try:
            yield
        except OSError as error:
            self._trace = None
            logger.warning("%s: %s; the profile is not written on", PROFILE, error)
