"""What watching a run costs: the demo with and without the checks of its numbers, and with and without kept samples.

    .venv/bin/python benchmarks/watching.py [--rounds 5] [--rollouts 6]

Sides take turns, each run a process of its own. All do the same work bit for bit, so rollout by rollout their processor
times (of all threads and processes, the first rollout left out) are compared with those of the run that neither checks
nor keeps. Exits with 1 when the median of either is above `--most` (2%).
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from _harness import Parser, in_turns, spread, table

CLOCK = Path(__file__).resolve().parent / "clock"

SIDES = {
    "neither": (True, "none"),
    "invariants": (False, "none"),
    "kept samples": (True, "all"),
    "both (the default)": (False, "all"),
}
"""Whether the plugin `invariants` is blocked, and `--log-samples`."""

WITHOUT_CHECKS = """
import sys
import pluggy
from slime_core.cli.main import main

made = pluggy.PluginManager.__init__
def make(self, *args, **kwargs):
    made(self, *args, **kwargs)
    self.set_blocked("slime-rl:invariants")
pluggy.PluginManager.__init__ = make
sys.exit(main(sys.argv[1:]))
"""
"""slime's own plugins are always on, so the command line has no word for this."""


def run(folder: Path, side: str, rollouts: int) -> list[float]:
    """Processor seconds of each rollout but the first."""
    blocked, kept = SIDES[side]
    clock = folder / "clock.jsonl"
    clock.unlink(missing_ok=True)
    slime = ["-c", WITHOUT_CHECKS] if blocked else ["-m", "slime_core"]
    own = ["--log-samples", kept, "--num-rollout", str(rollouts), "--save", str(folder / "run"), "--overwrite"]
    command = [sys.executable, *slime, "train", "--config", "run.yaml", "--plugin-dir", str(CLOCK), *own]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "BENCH_CLOCK_FILE": str(clock)}
    subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
    events = map(json.loads, clock.read_text(encoding="utf-8").splitlines())
    ends = [event["cpu"] for event in events if event["event"] == "step_end"]
    return [after - before for before, after in itertools.pairwise(ends)]


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="runs of each side")
    parser.add_argument("--rollouts", type=int, default=6, help="of a run")
    parser.add_argument("--most", type=float, default=0.02, help="share of a rollout that either may cost")
    own = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="slime-watching-") as name:
        folder = Path(name)
        subprocess.run([sys.executable, "-m", "slime_core", "init", "demo", "run.yaml"], cwd=folder, check=True)
        run(folder, "neither", 1)  # makes model and data
        seconds = in_turns({side: partial(run, folder, side, own.rollouts) for side in SIDES}, own.rounds)
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
