"""Measure the time until a command answers, a run is checked, and the first rollout of training is finished.

    .venv/bin/python benchmarks/startup.py [--config run.yaml]

Light commands and `slime check` are compared with `python -c pass` of the same interpreter, in turns. The training run
is the real `slime train --num-rollout 1` on existing inputs (a model with random weights of the quick start's size, and
its problems). A hook plugin (`benchmarks/clock`) records the time of each stage, and a second process imports the heavy
packages one after the other. CPU seconds are those of all threads of the process, including the start of the
interpreter; on a free machine with one thread they are about the wall time.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from _harness import Parser, in_turns, ratio, spread, table

HERE = Path(__file__).resolve().parent
AIM = 0.5
"""Target in seconds for the light commands."""
CHECK_AIM = 5.0
"""Target in seconds for `slime check`."""
FIRST_AIM = 0.53
"""Target for the CPU seconds of torch's import to those of the first rollout."""
LIGHT = (["--help"], ["plugins", "list"], ["config", "show"])
STAGES = {
    "loaded": "interpreter, settings, torch, plugins",
    "configured": "components resolved and checked",
    "run_start": "data, tokenizer, trainer built",
    "rollout_end": "engine started, first rollout",
    "step_end": "trained on it",
    "run_end": "run closed",
    "exit": "process gone",
}
LIBRARIES = ("numpy", "torch", "transformers", "transformers:AutoTokenizer")
IMPORTS = """
import importlib, json, time
names = ["slime_core.config.load", "numpy", "torch", "slime_core.launch.inline", "transformers", "{auto}",
         "slime_embedded.engine.engine", "slime_embedded.trainer.trainer"]
times = {{}}
for name in names:
    wall, cpu = time.perf_counter(), time.process_time()
    module, _, attribute = name.partition(":")
    found = importlib.import_module(module)
    if attribute:
        getattr(found, attribute)
    times[name] = (time.perf_counter() - wall, time.process_time() - cpu)
print(json.dumps(times))
""".format(auto="transformers:AutoTokenizer")


@dataclass(frozen=True)
class Spent:
    """Wall and CPU time of one process, in seconds."""

    wall: float
    cpu: float


def spend(command: Sequence[str], environment: dict[str, str] | None = None) -> Spent:
    """Run a command to its end. Raises SystemExit with the command's output if it fails."""
    with tempfile.TemporaryFile() as output:
        started = time.perf_counter()
        process = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, **(environment or {})})
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.perf_counter() - started
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            output.seek(0)
            raise SystemExit(f"{' '.join(command)} failed:\n{output.read().decode(errors='replace')[-4000:]}")
    return Spent(wall, usage.ru_utime + usage.ru_stime)


def light_commands(repeats: int) -> None:
    """Compare `slime --help` and similar commands with an interpreter that does nothing."""
    slime = str(Path(sys.executable).with_name("slime"))
    compare({f"slime {' '.join(words)}": [slime, *words] for words in LIGHT}, repeats)
    print(f"(aim: each slime command under {AIM} s)")


def checks(config: str, repeats: int) -> None:
    """Compare `slime check` on existing inputs, which imports torch twice: here and in the fresh process."""
    slime = str(Path(sys.executable).with_name("slime"))
    with tempfile.TemporaryDirectory(prefix="slime-bench-") as name:
        flags = [*write_inputs(Path(name)), "--save", str(Path(name) / "run")]
        compare({"slime check": [slime, "check", config, *flags]}, repeats)
    print(f"(aim: under {CHECK_AIM} s)")


def compare(others: dict[str, list[str]], repeats: int) -> None:
    """Compare commands with an interpreter that does nothing."""
    commands = {"python -c pass": [sys.executable, "-c", "pass"], **others}
    found = in_turns({name: lambda c=command: spend(c) for name, command in commands.items()}, repeats + 1)  # type: ignore[misc]
    found = {name: runs[1:] for name, runs in found.items()}  # the first fills the file caches
    base = statistics.median(spent.cpu for spent in found["python -c pass"])
    rows = []
    for name, runs in found.items():
        wall, cpu = [s.wall for s in runs], [s.cpu for s in runs]
        cells = [f"{statistics.median(wall):.3f}", spread(wall), f"{statistics.median(cpu):.3f}", spread(cpu)]
        rows.append([name, *cells, f"{statistics.median(cpu) / base:.1f}x"])
    print(table(["command", "wall s", "spread", "CPU s", "spread", "CPU of bare"], rows))


def write_inputs(directory: Path) -> list[str]:
    """Write the quick start's model and problems, without its warm-up; return the flags that name them."""
    from slime_commands.init import task
    from slime_commands.init.tiny_model import write_random_model

    train, held_out = task.split_problems()
    flags = ["--hf-checkpoint", str(directory / "model")]
    write_random_model(directory / "model", 0)
    for name, problems in (("train", train), ("heldout", held_out)):
        rows = [json.dumps({"input": task.question(p), "label": str(sum(p))}) for p in problems]
        (directory / f"{name}.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    return [*flags, "--prompt-data", str(directory / "train.jsonl"), "--eval-prompt-data", "addition",
            str(directory / "heldout.jsonl")]  # fmt: skip


def timeline(config: str, flags: list[str], directory: Path) -> dict[str, Spent]:
    """Train for one rollout; return stage -> wall and CPU time since the start of the command."""
    clock = directory / "clock.jsonl"
    clock.unlink(missing_ok=True)
    slime = str(Path(sys.executable).with_name("slime"))
    command = [slime, "train", "--config", config, *flags, "--num-rollout", "1", "--skip-eval-before-train"]
    command += ["--save", str(directory / "run"), "--overwrite", "--plugin-dir", str(HERE / "clock")]
    started = time.time()
    total = spend(command, {"BENCH_CLOCK_FILE": str(clock)})
    reached: dict[str, Spent] = {}
    for line in clock.read_text(encoding="utf-8").splitlines():
        event = json.loads(line)
        reached.setdefault(event["event"], Spent(event["time"] - started, event["cpu"]))
    return {**reached, "exit": total}


def first_rollout(config: str, repeats: int, imported: dict[str, float]) -> None:
    """Measure the time to the first rollout, by stage; its floor is the time of the libraries' imports."""
    with tempfile.TemporaryDirectory(prefix="slime-bench-") as name:
        directory = Path(name)
        flags = write_inputs(directory)
        runs = [timeline(config, flags, directory) for _ in range(repeats + 1)][1:]
    rows = []
    for before, stage in pairwise(["", *STAGES]):
        walls = [run[stage].wall - (run[before].wall if before else 0.0) for run in runs]
        cpus = [run[stage].cpu - (run[before].cpu if before else 0.0) for run in runs]
        at = statistics.median(run[stage].wall for run in runs)
        cells = [f"{statistics.median(walls):.3f}", f"{statistics.median(cpus):.3f}", f"{at:.3f}"]
        rows.append([STAGES[stage], *cells])
    print(table(["slime train, one rollout", "wall s", "CPU s", "wall s since start"], rows))
    ends = [run["rollout_end"] for run in runs]
    wall, cpu = [s.wall for s in ends], [s.cpu for s in ends]
    print(
        f"command to first rollout: {statistics.median(wall):.2f} s wall (spread {spread(wall)}),"
        f" {statistics.median(cpu):.2f} CPU-s (spread {spread(cpu)})"
    )
    floor = sum(imported[name] for name in LIBRARIES)
    ratio("CPU time, import torch / command to first rollout", cpu, [imported["torch"]], floor=floor, aim=FIRST_AIM)


def imports(repeats: int) -> dict[str, float]:
    """Print and return the CPU seconds of imports in the order of a run, each on top of the previous ones."""
    runs = []
    for _ in range(repeats + 1):
        done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True)
        runs.append(json.loads(done.stdout))
    rows = []
    for name in runs[0]:
        walls, cpus = [run[name][0] for run in runs[1:]], [run[name][1] for run in runs[1:]]
        rows.append([name, f"{statistics.median(walls):.3f}", f"{statistics.median(cpus):.3f}", spread(cpus)])
    print(table(["import, one after the other", "wall s", "CPU s", "spread"], rows))
    return {name: statistics.median(run[name][1] for run in runs[1:]) for name in runs[0]}


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument(
        "--config", default=str(HERE.parent / "plugins/commands/slime_commands/init/templates/demo.yaml")
    )
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    light_commands(options.repeats)
    print()
    checks(options.config, options.repeats)
    print()
    imported = imports(options.repeats)
    print()
    first_rollout(options.config, options.repeats, imported)


if __name__ == "__main__":
    main()
