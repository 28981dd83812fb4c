"""Compare all algorithms on the demo task: held-out accuracy before and after, wall time, ratios to grpo.

    python benchmarks/algorithms.py [--estimators grpo rloo ...] [--seeds 0 1 2] [--jobs 1] [--flags "--num-rollout 20"]

Algorithms are the installed estimators, and the losses of `PAPER` on top of grpo. All use the same model, problems,
rollouts and optimizer (`slime init demo`); they differ only in their own defaults and the settings of their papers.
Prints a Markdown table. Exits with 1 if an algorithm's mean accuracy did not rise by at least 0.2.
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
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
DEMO = str(ROOT / "plugins/commands/slime_commands/init/templates/demo.yaml")
SLIME = str(Path(sys.executable).with_name("slime"))
REFERENCE = "grpo"
LEAST_GAIN = 0.2

PAPER = {
    "cispo": ["--eps-clip", "1.0", "--eps-clip-high", "4.0"],
    "clip_cov": ["--loss-type", "clip_cov", "--set", "plugins.clip_cov.share=2e-3"],
    "dr_grpo": ["--no-calculate-per-token-loss", "--no-use-kl-loss", "--kl-loss-coef", "0"],
    "gdpo": ["--custom-rm-path", "weighted_sum", "--set", 'plugins.weighted_sum.terms=[{"reward": "exact"}]'],
    "gmpo": ["--eps-clip", "0.32968", "--eps-clip-high", "0.491825", "--no-calculate-per-token-loss"],
    "gspo": ["--eps-clip", "3e-4", "--eps-clip-high", "4e-4"],
    "kl_cov": ["--loss-type", "kl_cov", "--set", "plugins.kl_cov.share=2e-3"],
    "sapo": ["--no-calculate-per-token-loss"],
    "vapo": ["--critic-lr", "1e-3", "--set", "plugins.vapo.length_alpha=1"],
}
"""Algorithm -> settings of its paper that differ from the template `demo`, fitted to answers of some 15 tokens."""


@dataclass
class Run:
    """The results of a training run."""

    estimator: str
    seed: int
    before: float
    after: float
    seconds: float


def inputs_flags(inputs: Path, seed: int) -> list[str]:
    """Return the flags with the seed's model and problems."""
    flags = ["--seed", str(seed), "--rollout-seed", str(seed), "--hf-checkpoint", str(inputs / "model")]
    flags += ["--prompt-data", str(inputs / "train.jsonl")]
    return [*flags, "--eval-prompt-data", "addition", str(inputs / "heldout.jsonl")]


def make_inputs(inputs: Path, seed: int) -> None:
    """Warm up the seed's model once, so that the time is not part of a run."""
    code = (
        "import sys; from slime_core.config import load_settings; from slime_commands.init.prepare import prepare;"
        "prepare(load_settings(sys.argv[1:]).args)"
    )
    argv = [
        "--config",
        DEMO,
        "--save",
        str(inputs / "run"),
        *inputs_flags(inputs, seed),
    ]
    subprocess.run([sys.executable, "-c", code, *argv], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


def train(root: Path, estimator: str, seed: int, further: list[str]) -> Run | None:
    """Run a training on the seed's inputs; on failure return None and print slime's message on standard error."""
    save = root / f"{estimator}-{seed}"
    own = PAPER.get(estimator, [])
    argv = [SLIME, "train", "--config", DEMO, *own]
    argv += [] if "--loss-type" in own else ["--advantage-estimator", estimator]
    argv += [*inputs_flags(root / f"seed-{seed}", seed), "--save", str(save), *further]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        print(f"{estimator} seed {seed} failed: {done.stderr.strip()[-2000:]}", file=sys.stderr, flush=True)
        return None
    summary = json.loads((save / "summary.json").read_text())
    return Run(estimator, seed, summary["eval_before"], summary["eval_after"], summary["wall_seconds"])


def markdown(runs: Iterable[Run]) -> str:
    """Format one row per estimator; ratios are means divided by means of the reference's runs in this call."""
    by_name: dict[str, list[Run]] = {}
    for run in runs:
        by_name.setdefault(run.estimator, []).append(run)
    lines = [
        f"| estimator | before | after (lowest seed) | accuracy / {REFERENCE} | wall s | wall / {REFERENCE} |",
        "|---|---|---|---|---|---|",
    ]
    reference = by_name.get(REFERENCE)
    for name, group in by_name.items():
        after, seconds = _mean(r.after for r in group), _mean(r.seconds for r in group)
        ratios = ["-", "-"]
        if reference:
            others = _mean(r.after for r in reference), _mean(r.seconds for r in reference)
            ratios = [f"{after / others[0]:.2f}" if others[0] else "-", f"{seconds / others[1]:.2f}"]
        lowest = min(r.after for r in group)
        lines.append(
            f"| `{name}` | {_mean(r.before for r in group):.3f} | {after:.3f} ({lowest:.3f}) | {ratios[0]}"
            f" | {seconds:.1f} | {ratios[1]} |"
        )
    return "\n".join(lines)


def unlearned(runs: Iterable[Run]) -> list[str]:
    """Return the estimators whose mean accuracy did not rise by `LEAST_GAIN`."""
    gains: dict[str, list[float]] = {}
    for run in runs:
        gains.setdefault(run.estimator, []).append(run.after - run.before)
    return [name for name, values in gains.items() if _mean(values) < LEAST_GAIN]


def _mean(values: Iterable[float]) -> float:
    return statistics.fmean(values)


def installed_algorithms() -> list[str]:
    """Return all estimators of `slime plugins list` and the losses of `PAPER`, the reference first."""
    from slime_core.plugins.manager import current_registry

    names = {*current_registry().names("estimators"), *PAPER}
    return sorted(names, key=lambda name: (name != REFERENCE, name))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--estimators", nargs="+", default=None, help="default: all that are installed")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time; wall times are comparable with 1")
    parser.add_argument("--flags", default="", help="further flags of slime train, as one string")
    options = parser.parse_args()
    names, further = options.estimators or installed_algorithms(), shlex.split(options.flags)
    runs: list[Run] = []
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(options.jobs) as pool:
        root = Path(directory)
        for seed in options.seeds:
            (root / f"seed-{seed}").mkdir()
        list(pool.map(lambda seed: make_inputs(root / f"seed-{seed}", seed), options.seeds))
        # Seeds in the outer loop, so that the reference runs under the same conditions as the others.
        tasks = [(name, seed) for seed in options.seeds for name in names]
        for run in pool.map(lambda task: train(root, *task, further), tasks):
            if run is None:
                continue
            runs.append(run)
            print(f"{run.estimator} seed {run.seed}: {run.before:.3f} -> {run.after:.3f}, {run.seconds:.1f} s",
                  file=sys.stderr, flush=True)  # fmt: skip
    print(f"seeds {' '.join(map(str, options.seeds))}, {options.jobs} at a time, {os.cpu_count()} processors\n")
    print(markdown(sorted(runs, key=lambda r: names.index(r.estimator))))
    failed = unlearned(runs)
    if failed:
        print(f"did not learn (gain below {LEAST_GAIN}): {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed) or len(runs) < len(tasks))


if __name__ == "__main__":
    sys.exit(main())
