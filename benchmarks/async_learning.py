"""Run the demo task in every asynchronous mode and in `sync`: held-out score by staleness limit, with and without TIS.

    python benchmarks/async_learning.py [--seeds 0 1 2] [--modes sync one-step "full 4"] [--flags "--lr 3e-5"]

All modes use the same model, problems, rollouts and optimizer (`slime init demo`, fewer rollouts). "full K" is
--async-mode full with --max-staleness K and room for K rollouts in --async-buffer-groups, so that samples can become
that old; a column shows the measured staleness. Prints a Markdown table of all seeds so far after every seed. Exits
with 1 if a run failed, exceeded its staleness limit, or a mode's mean accuracy did not rise by at least 0.2. This
benchmark is about learning: trainer and engine share the same processor cores, so the seconds do not show the speed-up
of asynchrony. `async_overlap.py` measures the speed-up.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from algorithms import DEMO, LEAST_GAIN, ROOT, SLIME, inputs_flags, make_inputs

BATCH = 32
"""`rollout_batch_size` of the template `demo`."""
QUARTERS = 4
"""Number of evaluations after the first."""
MODES = ("sync", "one-step", "full 1", "full 2", "full 4")


@dataclass(frozen=True)
class Run:
    """The numbers of one training run."""

    mode: str
    tis: bool
    seed: int
    scores: tuple[float, ...]
    """Held-out accuracy before training, and after each quarter of the training."""
    mean_age: float
    """Weight versions between a sample's oldest token and its training, mean over all samples of the run."""
    max_age: float
    seconds: float

    @property
    def gain(self) -> float:
        """Return the gain in accuracy from before to after the training."""
        return self.scores[-1] - self.scores[0]


def mode_flags(mode: str) -> list[str]:
    """Return the flags of a mode."""
    name, _, limit = mode.partition(" ")
    if name == "sync":
        return []
    if name == "one-step":
        return ["--async", "--async-mode", name, "--max-staleness", "1"]
    flags = ["--async", "--async-mode", "full", "--max-staleness", limit]
    return [*flags, "--async-buffer-groups", str(BATCH * int(limit))]


def limit_of(mode: str) -> int:
    """Return the maximum age of samples in weight versions."""
    name, _, limit = mode.partition(" ")
    return {"sync": 0, "one-step": 1}.get(name) if not limit else int(limit)  # type: ignore[return-value]


def train(root: Path, mode: str, tis: bool, seed: int, num_rollout: int, further: Sequence[str]) -> Run | None:
    """Train once on the seed's inputs; if the run fails, print slime's message to standard error and return None."""
    save = root / f"{mode.replace(' ', '-')}-{'tis' if tis else 'plain'}-{seed}"
    argv = [SLIME, "train", "--config", DEMO, "--save", str(save)]
    argv += [*inputs_flags(root / f"seed-{seed}", seed), "--num-rollout", str(num_rollout)]
    argv += ["--eval-interval", str(num_rollout // QUARTERS), "--save-interval", str(num_rollout)]
    argv += [*mode_flags(mode), *(["--use-tis"] if tis else []), *further]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        print(f"{mode} seed {seed} failed: {done.stderr.strip()[-2000:]}", file=sys.stderr, flush=True)
        return None
    summary = json.loads((save / "summary.json").read_text())
    steps = [json.loads(line) for line in (save / "metrics.jsonl").read_text().splitlines()]
    scores = [step["eval/addition"] for step in steps if "eval/addition" in step]
    ages = [step["rollout/staleness/mean"] for step in steps if "rollout/staleness/mean" in step]
    oldest = [step["rollout/staleness/max"] for step in steps if "rollout/staleness/max" in step]
    age, most = statistics.fmean(ages or [0.0]), max(oldest, default=0.0)
    return Run(mode, tis, seed, tuple(scores), age, most, summary["wall_seconds"])


def markdown(runs: Iterable[Run], num_rollout: int) -> str:
    """Return a table with a row per mode and correction: means over seeds, and the lowest final accuracy."""
    by_row: dict[tuple[str, bool], list[Run]] = {}
    for run in runs:
        by_row.setdefault((run.mode, run.tis), []).append(run)
    after = " | ".join(f"after {num_rollout * (i + 1) // QUARTERS}" for i in range(QUARTERS))
    lines = [
        f"| mode | `--max-staleness` | TIS | staleness: mean (most) | before | {after} | lowest seed | wall s |",
        "|---" * (QUARTERS + 7) + "|",
    ]
    for (mode, tis), group in by_row.items():
        name = mode.partition(" ")[0]
        limit = "-" if name == "sync" else str(limit_of(mode))
        age = f"{_mean(r.mean_age for r in group):.2f} ({max(r.max_age for r in group):.0f})"
        scores = " | ".join(f"{_mean(column):.3f}" for column in zip(*(r.scores for r in group), strict=True))
        lines.append(
            f"| {name} | {limit} | {'yes' if tis else 'no'} | {age} | {scores} | {min(r.scores[-1] for r in group):.3f}"
            f" | {_mean(r.seconds for r in group):.0f} |"
        )
    return "\n".join(lines)


def wrong(runs: Sequence[Run]) -> list[str]:
    """Return the failures: runs that trained on samples older than allowed, and modes that did not learn."""
    found = [
        f"{run.mode} seed {run.seed}: samples of age {run.max_age:.0f}" for run in runs
        if run.max_age > limit_of(run.mode)
    ]  # fmt: skip
    gains: dict[tuple[str, bool], list[float]] = {}
    for run in runs:
        gains.setdefault((run.mode, run.tis), []).append(run.gain)
    found += [
        f"{mode}{' with TIS' if tis else ''}: gain {_mean(values):.3f}, below {LEAST_GAIN}"
        for (mode, tis), values in gains.items()
        if _mean(values) < LEAST_GAIN
    ]
    return found


def _mean(values: Iterable[float]) -> float:
    return statistics.fmean(values)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--modes", nargs="+", default=list(MODES), metavar="MODE", help="sync, one-step, 'full K'")
    parser.add_argument("--num-rollout", type=int, default=20)
    parser.add_argument("--flags", default="", help="further flags of slime train, as one string")
    options = parser.parse_args()
    if options.num_rollout % QUARTERS:
        parser.error(f"--num-rollout: a multiple of {QUARTERS}, since there are so many evaluations")
    further = shlex.split(options.flags)
    # Without --async the same weights sample and train, so TIS has nothing to correct.
    rows = [(mode, tis) for mode in options.modes for tis in (False, True) if not (tis and mode == "sync")]
    runs: list[Run] = []
    print(f"{options.num_rollout} rollouts a run, {os.cpu_count()} processors, one run at a time")
    with tempfile.TemporaryDirectory(prefix="slime-bench-") as directory:
        root = Path(directory)
        for seed in options.seeds:
            (root / f"seed-{seed}").mkdir()
            make_inputs(root / f"seed-{seed}", seed)
            for mode, tis in rows:
                run = train(root, mode, tis, seed, options.num_rollout, further)
                if run is None:
                    continue
                runs.append(run)
                scores = " ".join(f"{score:.3f}" for score in run.scores)
                print(
                    f"{mode}{' tis' if tis else ''} seed {seed}: {scores}, age {run.mean_age:.2f}, {run.seconds:.0f} s",
                    file=sys.stderr, flush=True,
                )  # fmt: skip
            print(f"\nseeds up to {seed}\n\n{markdown(runs, options.num_rollout)}", flush=True)
    found = wrong(runs)
    print("\n".join(found), file=sys.stderr)
    return int(bool(found) or len(runs) < len(rows) * len(options.seeds))


if __name__ == "__main__":
    sys.exit(main())
