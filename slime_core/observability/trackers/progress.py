"""Prints one line per rollout: reward, held-out score, speed, time left. Rich on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime_core.plugins.hookspecs import hookimpl


class ProgressTracker:
    """The lines a person watches."""

    def __init__(self) -> None:
        self._args: Any = None
        self._started = 0.0
        self._score: float | None = None
        self._console: Any = None

    @hookimpl
    def slime_run_start(self, args: Any, run_dir: Path) -> None:
        """Start the clock."""
        self._args = args
        self._started = time.perf_counter()
        if sys.stdout.isatty():
            from rich.console import Console

            self._console = Console(highlight=True, soft_wrap=True)

    @hookimpl
    def slime_log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """One line per rollout; an evaluation before training gets a line of its own."""
        args = self._args
        if args is None:
            return
        datasets = [d.name for d in args.eval_datasets or []]
        if datasets and f"eval/{datasets[0]}" in metrics:
            self._score = metrics[f"eval/{datasets[0]}"]
        parts = [f"rollout {step}/{args.num_rollout}"]
        for label, key, form in _COLUMNS:
            if key in metrics and not (label == "reward" and not args.compute_advantages_and_returns):
                parts.append(f"{label} {metrics[key]:{form}}")
        if self._score is not None:
            parts.insert(2 if len(parts) > 1 else 1, f"held-out {self._score:.3f}")
        done = step - (args.start_rollout_id or 0)
        if done > 0:
            left = (time.perf_counter() - self._started) / done * (args.num_rollout - step)
            parts.append(f"left {left:.0f} s")
        self._print("  ".join(parts))

    def _print(self, line: str) -> None:
        if self._console is not None:
            self._console.print(line)
        else:
            print(line, flush=True)


_COLUMNS = (
    ("reward", "rollout/raw_reward", ".3f"),
    ("loss", "train/loss", ".4f"),
    ("length", "rollout/response_len/mean", ".1f"),
    ("tok/s", "perf/tokens_per_sec", ".0f"),
    ("dlogp", "train/train_rollout_logprob_abs_diff", ".1e"),
)
