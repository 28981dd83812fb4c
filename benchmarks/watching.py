"""Cost of watching a run: the demo with number checks, and with kept samples, in every other rollout.

    .venv/bin/python benchmarks/watching.py [--rounds 5] [--rollouts 12]

Runs come in pairs that do the same work bit for bit: one is watched in its even rollouts, the other in its odd ones. So
each rollout has a twin, and a difference in speed between the two runs raises as many ratios as it lowers. A cost is
the median over twins of the ratio of processor time with watching to without (all threads and processes, without the
first rollout), with even and odd rollouts weighted equally. The interval holds 95% of 2,000 bootstrap draws among the
twins. Exits with 1 if a whole interval is above `--most` (2%).

A second, less noisy measure: the hooks' own processor time as a share of a rollout's, on the run's thread, for which
the rollout waits, and on the thread that writes samples concurrently.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from _harness import Parser, table

CLOCK = Path(__file__).resolve().parent / "clock"
SIDES = {"invariants": "Invariants", "kept samples": "SampleStore", "both": "Invariants SampleStore"}
"""Side -> plugins that are off in every other rollout; all other plugins are always off."""
_DRAWS = 2_000

EVERY_OTHER = """
import collections, functools, json, sys, time
from slime_core.cli.main import main
from slime_hooks.invariants import Invariants
from slime_runs.store import SampleStore

watch, parity = sys.argv[1].split(), int(sys.argv[2])
own, within = collections.defaultdict(list), []

def timed(name, call):
    @functools.wraps(call)
    def measured(*told):
        within.append(name)
        began = time.thread_time()
        try:
            return call(*told)
        finally:
            own[name].append(time.thread_time() - began)
            within.remove(name)
    return measured

def every_other(cls, name, rollout):
    method = timed(f"{cls.__name__}.{name}", getattr(cls, name))
    @functools.wraps(method)
    def call(self, *told):
        return method(self, *told) if cls.__name__ in watch and rollout(told) % 2 == parity else None
    setattr(cls, name, call)

for cls in (Invariants, SampleStore):
    every_other(cls, "slime_log_rollout", lambda told: told[0])
    every_other(cls, "slime_rollout_trained", lambda told: told[1].batch.rollout_id)
later = SampleStore._later
SampleStore._later = lambda self, write: later(self, timed("beside", write) if set(within) - {"beside"} else write)
status = main(sys.argv[3:])
json.dump(own, open("own.json", "w"))
sys.exit(status)
"""
"""slime's own plugins are always on, so no option does this. A hook is called with positional arguments."""


_HOOKS = ("slime_log_rollout", "slime_rollout_trained")
"""Hooks that are called once a rollout; for each, one file is written in another thread."""


def run(folder: Path, watch: str, parity: int, rollouts: int) -> list[float]:
    """Return the processor seconds of each rollout but the first; `own.json` gets the seconds of each hook."""
    clock = folder / "clock.jsonl"
    clock.unlink(missing_ok=True)
    own = ["--num-rollout", str(rollouts), "--save", str(folder / "run"), "--overwrite", "--plugin-dir", str(CLOCK)]
    command = [sys.executable, "-c", EVERY_OTHER, watch, str(parity), "train", "--config", "run.yaml", *own]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "BENCH_CLOCK_FILE": str(clock)}
    subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
    events = map(json.loads, clock.read_text(encoding="utf-8").splitlines())
    ends = [event["cpu"] for event in events if event["event"] == "step_end"]
    return [after - before for before, after in itertools.pairwise(ends)]


def own_seconds(folder: Path) -> tuple[float, float]:
    """Return the seconds of the last run's hooks per rollout: on the run's thread, and on other threads."""
    found = json.loads((folder / "own.json").read_text(encoding="utf-8"))
    beside = statistics.median(found.pop("beside")) * len(_HOOKS) if "beside" in found else 0.0
    return sum(map(statistics.median, found.values())), beside


def twins(even: Sequence[float], odd: Sequence[float]) -> list[list[float]]:
    """Return log(watched / unwatched) for even and for odd rollouts."""
    found: list[list[float]] = [[], []]
    for rollout, seconds in enumerate(zip(even, odd), start=1):
        found[rollout % 2].append(math.log(seconds[rollout % 2] / seconds[1 - rollout % 2]))
    return found


def cost(ratios: Sequence[Sequence[float]]) -> float:
    """Return the cost as a share of a rollout, from the ratios of even and of odd rollouts."""
    return math.expm1(statistics.fmean(statistics.median(part) for part in ratios))


def interval(ratios: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Return the interval that holds 95% of the draws."""
    draw = random.Random(0)
    costs = sorted(cost([draw.choices(part, k=len(part)) for part in ratios]) for _ in range(_DRAWS))
    return costs[_DRAWS // 40], costs[-_DRAWS // 40 - 1]


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="pairs of runs of each side")
    parser.add_argument("--rollouts", type=int, default=12, help="of a run; at least 3")
    parser.add_argument("--most", type=float, default=0.02, help="share of a rollout that either may cost")
    own = parser.parse_args()
    ratios: dict[str, list[list[float]]] = {side: [[], []] for side in SIDES}
    seconds: list[float] = []
    told: dict[str, list[tuple[float, float]]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory(prefix="slime-watching-") as name:
        folder = Path(name)
        subprocess.run([sys.executable, "-m", "slime_core", "init", "demo", "run.yaml"], cwd=folder, check=True)
        run(folder, "", 0, 1)  # makes model and data
        for number in range(own.rounds):
            for side, watch in SIDES.items():
                pair: dict[int, list[float]] = {}
                for parity in (number % 2, 1 - number % 2):
                    pair[parity] = run(folder, watch, parity, own.rollouts)
                    told[side].append(own_seconds(folder))
                seconds += pair[0] + pair[1]
                for part, more in zip(ratios[side], twins(pair[0], pair[1])):
                    part += more
    rows, above, rollout = list[list[str]](), list[str](), statistics.median(seconds)
    for side, found in ratios.items():
        low, high = interval(found)
        shares = [f"{statistics.median(part) / rollout:.2%}" for part in zip(*told[side])]
        rows.append([side, f"{cost(found):+.2%}", f"{low:+.2%} to {high:+.2%}", str(sum(map(len, found))), *shares])
        if side != "both" and low > own.most:
            above.append(side)
    print(f"a rollout takes {rollout:.3f} s of processor")
    print(table(["side", "cost", "95% interval", "twins", "own, run's thread", "own, beside it"], rows))
    print(f"above {own.most:.0%}: {', '.join(above) or 'none'}")
    return int(bool(above))


if __name__ == "__main__":
    sys.exit(main())
