"""Print progress: one line per rollout (reward, held-out score, speed, time left), and a bar on a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime_core.plugins.hookspecs import hookimpl
from slime_core.protocols import Args
from slime_core.waits import first_results

_COLUMNS = (
    ("reward", "rollout/raw_reward", ".3f"),
    ("loss", "train/loss", ".4f"),
    ("length", "rollout/response_len/mean", ".1f"),
    ("tok/s", "perf/tokens_per_sec", ".0f"),
    ("dlogp", "train/train_rollout_logprob_abs_diff", ".1e"),
)


class ProgressTracker:
    """A tracker that prints plain lines, and a live bar below them if standard output is a terminal."""

    def __init__(self) -> None:
        self._args: Any = None
        self._started = 0.0
        self._bar: Any = None
        self._task: Any = None

    @hookimpl
    def slime_run_start(self, args: Args, run_dir: Path) -> None:
        """Start the clock and, on a terminal, the bar."""
        self._args = args
        self._started = time.perf_counter()
        if sys.stdout.isatty():
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (TextColumn("rollouts"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, transient=True)
            self._task = self._bar.add_task("rollouts", total=args.num_rollout, completed=args.start_rollout_id or 0)
            self._bar.start()

    @hookimpl
    def slime_log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print one line per rollout, and a separate line for an evaluation before training."""
        if self._args is None:
            return
        if step > (self._args.start_rollout_id or 0):
            first_results()
        line = "  ".join(self._parts(step, metrics))
        if self._bar is None:
            print(line, flush=True)
        else:
            self._bar.update(self._task, completed=step)
            self._bar.console.print(line, soft_wrap=True)

    @hookimpl
    def slime_run_end(self, error: BaseException | None) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _parts(self, step: int, metrics: Mapping[str, float]) -> list[str]:
        args = self._args
        supervised = not args.compute_advantages_and_returns
        parts = [f"rollout {step}/{args.num_rollout}"]
        for label, key, form in _COLUMNS:
            if key in metrics and not (supervised and label == "reward"):
                parts.append(f"{label} {metrics[key]:{form}}")
        names = [f"eval/{dataset.name}" for dataset in args.eval_datasets]
        if names and names[0] in metrics:
            parts.insert(min(2, len(parts)), f"held-out {metrics[names[0]]:.3f}")
        done = step - (args.start_rollout_id or 0)
        if done > 0:
            left = (time.perf_counter() - self._started) / done * (args.num_rollout - step)
            parts.append(f"left {left:.0f} s")
        return parts
