"""Measure the cost of Ray: the same training run inline and under Ray on this machine, start-up and per rollout.

    .venv/bin/python benchmarks/ray_overhead.py [--config run.yaml] [--rollouts 4] [--repeats 2]

Both sides run the real command, alternating, on prepared inputs (the quick start's problems, and a random model of its
size). Start-up is the time from the command to its first line, when engine and trainer are up and a few problems have
been evaluated. A rollout is the time from the end of a rollout to the end of the next; the first is left out. CPU
seconds include the command and all its child processes. Each run under Ray starts a cluster, which is most of its
start-up; `--ray-address` joins a running cluster instead, whose daemons are not counted.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import psutil
from _harness import Parser, spread, table
from startup import write_inputs

HERE = Path(__file__).resolve().parent
_EVALUATED = 8
"""Number of held-out problems; few, since evaluation is in neither measurement."""
AIM = 10.0
"""Seconds from the command under Ray to its first line, on two free cores."""


@dataclass(frozen=True)
class Measured:
    """Measurements of one run, in seconds."""

    up: float
    up_cpu: float
    rollout: float
    rollout_cpu: float


def measure(flags: list[str], directory: Path) -> Measured:
    """Run the command to its end. Raises SystemExit with its output if it fails."""
    slime = str(Path(sys.executable).with_name("slime"))
    command = [slime, "train", *flags, "--save", str(directory / "run"), "--overwrite"]
    started, marks, said = time.perf_counter(), [], []
    with tempfile.TemporaryFile("w+") as errors:
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
        assert process.stdout is not None
        for line in process.stdout:
            said.append(line)
            if line.startswith("rollout "):
                marks.append((time.perf_counter() - started, cpu_below(process.pid)))
        if process.wait():
            errors.seek(0)
            raise SystemExit(f"{' '.join(command)} failed:\n{''.join(said)[-2000:]}{errors.read()[-2000:]}")
    steps = list(pairwise(marks[1:]))
    wall, cpu = (statistics.median(after[i] - before[i] for before, after in steps) for i in (0, 1))
    return Measured(marks[0][0], marks[0][1], wall, cpu)


def cpu_below(pid: int) -> float:
    """Return the CPU seconds of a process and all its living child processes."""
    top, total = psutil.Process(pid), 0.0
    for process in [top, *top.children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system + (times.children_user + times.children_system if process == top else 0.0)
    return total


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument(
        "--config", default=str(HERE.parent / "plugins/commands/slime_commands/init/templates/demo.yaml")
    )
    parser.add_argument("--rollouts", type=int, default=4, help="per run; 3 at least")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--ray-address", help="join this cluster instead of starting one per run")
    options = parser.parse_args()
    if options.rollouts < 3:
        parser.error("--rollouts: 3 at least, since the first one is left out")
    ray = ["--ray-address", options.ray_address] if options.ray_address else ["--launcher", "ray"]
    found: dict[str, list[Measured]] = {"inline": [], "Ray": []}
    with tempfile.TemporaryDirectory(prefix="slime-bench-") as name:
        flags = ["--config", options.config, *write_inputs(Path(name)), "--num-rollout", str(options.rollouts)]
        flags += ["--eval-interval", str(options.rollouts)]
        held_out = Path(name, "heldout.jsonl")
        held_out.write_text("".join(held_out.read_text("utf-8").splitlines(keepends=True)[:_EVALUATED]), "utf-8")
        for _ in range(options.repeats):
            found["inline"].append(measure([*flags, "--launcher", "inline"], Path(name)))
            found["Ray"].append(measure([*flags, *ray], Path(name)))
    report(found)


def report(found: dict[str, list[Measured]]) -> None:
    """Print the table and the ratios."""
    parts = {"start-up": ("up", "up_cpu"), "rollout": ("rollout", "rollout_cpu")}
    rows, medians = [], {}
    for part, (wall_name, cpu_name) in parts.items():
        for side, runs in found.items():
            wall, cpu = [getattr(run, wall_name) for run in runs], [getattr(run, cpu_name) for run in runs]
            medians[part, side] = statistics.median(wall), statistics.median(cpu)
            cells = [f"{medians[part, side][0]:.2f}", spread(wall), f"{medians[part, side][1]:.2f}", spread(cpu)]
            rows.append([f"{part}, {side}", *cells])
    print(table(["", "wall s", "spread", "CPU s", "spread"], rows))
    for part in parts:
        ratios = [with_ray / alone for with_ray, alone in zip(medians[part, "Ray"], medians[part, "inline"])]
        print(f"{part}, Ray / inline: {ratios[0]:.2f}x wall, {ratios[1]:.2f}x CPU")
    wall, cpu = medians["start-up", "Ray"]
    print(f"start-up under Ray: {wall:.1f} s wall, {cpu / 2:.1f} s if two cores did nothing else (aim: {AIM:.0f} s)")


if __name__ == "__main__":
    main()
