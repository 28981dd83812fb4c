"""What watching a run costs: the demo with and without the checks of its numbers, and with and without kept samples.

    .venv/bin/python benchmarks/watching.py [--rounds 5] [--rollouts 6]

Sides take turns, each run a process of its own. All do the same work bit for bit, so rollout by rollout their processor
times (of all threads, the first rollout left out) are compared with those of the run that neither checks nor keeps.
Exits with 1 when the median of either is above `--most` (2%).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from _table import spread, table

SIDES = {
    "neither": (True, "none"),
    "invariants": (False, "none"),
    "kept samples": (True, "all"),
    "both (the default)": (False, "all"),
}
"""Whether the plugin `invariants` is blocked, and `--log-samples`."""

WORKER = """
import json, sys, time
import pluggy
from slime_core import hookimpl
from slime_core.cli.main import main

blocked, out, argv = json.loads(sys.argv[1]), sys.argv[2], sys.argv[3:]
times = []

class Clock:
    @hookimpl
    def slime_step_end(self, rollout_id, metrics):
        times.append(time.process_time())

made = pluggy.PluginManager.__init__
def make(self, *args, **kwargs):
    made(self, *args, **kwargs)
    if blocked:
        self.set_blocked("slime-rl:invariants")
pluggy.PluginManager.__init__ = make
specs = pluggy.PluginManager.add_hookspecs
def with_clock(self, namespace):
    specs(self, namespace)
    if not self.is_registered(clock) and hasattr(self.hook, "slime_step_end"):
        self.register(clock)
pluggy.PluginManager.add_hookspecs = with_clock
clock = Clock()
status = main(argv)
json.dump(times, open(out, "w"))
sys.exit(status)
"""


def run(folder: Path, side: str, rollouts: int, number: int) -> list[float]:
    """Processor seconds of each rollout but the first."""
    blocked, kept = SIDES[side]
    times = folder / "times.json"
    own = ["--log-samples", kept, "--num-rollout", str(rollouts), "--save", str(folder / f"{number}-{kept}-{blocked}")]
    command = [sys.executable, "-c", WORKER, json.dumps(blocked), str(times), "train", "--config", "run.yaml", *own]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
    found = json.loads(times.read_text(encoding="utf-8"))
    return [after - before for before, after in itertools.pairwise(found)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="runs of each side")
    parser.add_argument("--rollouts", type=int, default=6, help="of a run")
    parser.add_argument("--most", type=float, default=0.02, help="share of a rollout that either may cost")
    own = parser.parse_args()
    seconds: dict[str, list[list[float]]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory(prefix="slime-watching-") as name:
        folder = Path(name)
        subprocess.run([sys.executable, "-m", "slime_core", "init", "demo", "run.yaml"], cwd=folder, check=True)
        run(folder, "neither", 1, -1)  # makes model and data
        for number in range(own.rounds):
            for side in SIDES:
                seconds[side].append(run(folder, side, own.rollouts, number))
    rows, costs = [], {}
    for side, runs in seconds.items():
        ratios = [
            mine / theirs
            for one, other in zip(runs, seconds["neither"], strict=True)
            for mine, theirs in zip(one, other)
        ]
        costs[side] = statistics.median(ratios) - 1
        each = [value for one in runs for value in one]
        rows.append([side, f"{statistics.median(each):.3f}", spread(each), f"{costs[side]:+.1%}"])
    print(table(["side", "CPU s a rollout", "spread", "against neither"], rows))
    above = [side for side in ("invariants", "kept samples") if costs[side] > own.most]
    print(f"above {own.most:.0%}: {', '.join(above) or 'none'}")
    return int(bool(above))


if __name__ == "__main__":
    sys.exit(main())
