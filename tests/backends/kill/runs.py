"""Runs in which something is killed at given events, resumed to their end; what must hold afterwards.

`Kills(...)` does the unkilled run once, which also lists the events, then `check` once per list of kill points: the
first run meets the first point, the run that resumes it the second, and so on; the last one goes to its end. Each is a
fork of a process with the imports done (`tests.zygote`); as many go on at a time as there are such processes.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from queue import Queue
from typing import Any

from slime_runs.history import read_history
from slime_runs.inspect.ledger_verify import verify

from slime_core.checkpoint.store import find
from slime_core.errors import SlimeError
from tests.backends.kill.points import kind_of
from tests.conftest import TinyRun
from tests.engine_processes import EmbeddedServer
from tests.ports import free_port
from tests.zygote import Zygote

ROLLOUTS = 4
TINY: dict[str, Any] = {
    "num_rollout": ROLLOUTS, "rollout_batch_size": 2, "over_sampling_batch_size": 3, "n_samples_per_prompt": 2,
    "num_steps_per_rollout": 2, "rollout_max_response_len": 4, "partial_rollout": True, "eval_interval": 2,
    "save_interval": 1, "keep_checkpoints": 2,
}  # fmt: skip
"""Small enough that most of a run's second is what it does once."""
DEADLINE_S = 100
BEFORE = "tests.backends.kill.points:install"
NOT_COMPARED = ("state.json", "manifest.json", "ledger.json", ".metadata")
"""Files of a commit that hold times or names of the run, or of the save (torch.distributed.checkpoint)."""
KILLED = -signal.SIGKILL
ENDS: dict[str, set[int]] = {
    "kill": {KILLED},
    "worker": {0},  # another process takes the place of the reward worker
    "engine": {0, 1},  # 0: nobody needed it any more
    "drain": {0, 143},  # 143: before the loop runs
    "drain+": {0, 143, KILLED},
}
"""How the process ends in which the point is, by what is done there (`points`)."""


@dataclass
class Slot:
    """What one run at a time needs."""

    zygotes: Sequence[Zygote]
    """One per rank."""
    server: EmbeddedServer | None = None


@dataclass
class Kills:
    """One kind of run, in which the same is done at one event after another."""

    tiny: TinyRun
    root: Path
    zygotes: Sequence[Zygote]
    flags: Mapping[str, Any] = field(default_factory=dict)
    how: str = "kill"
    """What is done; see `points`."""
    bitwise: bool = True
    """Whether the run must end with the unkilled one's files and metrics; the ledger holds in any case."""
    ranks: int = 1
    """Trainer processes. A point `NAME@1#N` is in rank 1."""
    server: bool = False
    """Whether the engine is a process of its own."""
    events: Counter[str] = field(default_factory=Counter)
    done: Counter[str] = field(default_factory=Counter)
    """Kind -> kill points met."""
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self._made = [
            Slot(
                self.zygotes[first : first + self.ranks],
                EmbeddedServer("engine", self.tiny.root / "model") if self.server else None,
            )
            for first in range(0, len(self.zygotes), self.ranks)
        ]
        self._slots: Queue[Slot] = Queue()
        for slot in self._made:
            self._slots.put(slot)

    def close(self) -> None:
        """End the engines."""
        for slot in self._made:
            if slot.server is not None:
                slot.server.kill()

    @property
    def whole(self) -> Path:
        """Run directory of the run that nobody kills."""
        return self.root / "whole"

    def record(self) -> Counter[str]:
        """Do the unkilled run; its events, those of rank 1 with `@1`."""
        slot = self._slots.get()
        try:
            logs = [self.root / f"events{rank}" for rank in range(self.ranks)]
            ends = self._run(slot, self.whole, [{"KILL_LOG": str(log)} for log in logs])
        finally:
            self._slots.put(slot)
        assert all(status == 0 for status, _ in ends), ends
        assert ledger_problems(self.whole) == []
        for rank, log in enumerate(logs):
            self.events.update(name + f"@{rank}" * bool(rank) for name in log.read_text().split())
        return self.events

    def check_all(self, lists: Sequence[Sequence[str]]) -> None:
        """`check` for each list, some at a time; the first failures, with their points, fail the test."""
        started = time.monotonic()
        with ThreadPoolExecutor(len(self._made)) as pool:
            problems = [p for p in pool.map(self.problem, lists) if p]
        self.seconds += time.monotonic() - started
        assert not problems, f"{len(problems)} of {len(lists)} kill points:\n" + "\n".join(problems[:5])

    def problem(self, points: Sequence[str]) -> str | None:
        """What is wrong after kills at these points; None when all holds."""
        run_dir = self.root / "-".join(p.replace(".", "_").replace(":", "_").replace("#", "_") for p in points)
        shutil.rmtree(run_dir, ignore_errors=True)
        slot = self._slots.get()
        try:
            self.check(slot, points, run_dir)
        except (AssertionError, SlimeError, subprocess.TimeoutExpired) as error:
            return f"{' then '.join(points)} (in {run_dir}): {error}"
        finally:
            self._slots.put(slot)
        shutil.rmtree(run_dir, ignore_errors=True)
        return None

    def check(self, slot: Slot, points: Sequence[str], run_dir: Path) -> None:
        """Kill, resume to the end, and compare."""
        for place, point in enumerate(points):
            self._kill(slot, point, run_dir, again=place > 0)
        for status, said in self._run(slot, run_dir, [{}] * self.ranks):
            assert status == 0, f"the resumed run: status {status}: {said}"
        self.promises(run_dir)

    def _kill(self, slot: Slot, point: str, run_dir: Path, again: bool) -> None:
        """One run that is to meet its point."""
        told = self.root / f"told-{run_dir.name}"
        told.unlink(missing_ok=True)
        name, _, number = point.partition("#")
        name, _, rank = name.partition("@")
        environments: list[dict[str, str]] = [{} for _ in range(self.ranks)]
        environments[int(rank or 0)] = {"KILL_AT": f"{name}#{number}", "KILL_HOW": self.how, "KILL_TOLD": str(told)}
        ends = self._run(slot, run_dir, environments)
        status, said = ends.pop(int(rank or 0))
        if not told.exists():
            # Asynchronous runs differ, and a run that resumes may not come to an event that the whole run had.
            assert again or not self.bitwise, f"never came there, status {status}: {said}"
            assert status == 0, f"status {status} before it came there: {said}"
            return
        told.unlink()
        if self.how == "engine" and slot.server is not None:
            slot.server.kill()  # which waits for its end
        allowed = ENDS[self.how.rstrip("0123456789")]
        assert status in allowed, f"status {status}: {said}"
        last = point.startswith("finish")
        for other, said in ends:
            assert last or other not in (0, KILLED), f"another rank: status {other}: {said}"
        self.done[kind_of(point)] += 1

    def promises(self, run_dir: Path) -> None:
        """What holds of a run that is at its end, however often it was killed."""
        problems = ledger_problems(run_dir)
        assert not problems, "\n".join(problems)
        commits = sorted(path.name.split(".")[0] for path in (run_dir / "checkpoints").glob("rollout_*"))
        assert commits[-2:] == [f"rollout_{r:07d}" for r in (ROLLOUTS - 2, ROLLOUTS - 1)]
        assert len(commits) <= 3, f"{commits}: the newest two, and the best by the one evaluation set"
        left = [path.name for path in (run_dir / "checkpoints").iterdir() if path.name.startswith(".")]
        assert left == [], left
        steps = [line["step"] for line in metrics(run_dir)]
        assert steps == [line["step"] for line in metrics(self.whole)], steps
        if self.bitwise:
            assert metrics(run_dir) == metrics(self.whole), "metrics differ"
            ours, theirs = files(run_dir), files(self.whole)
            assert ours.keys() == theirs.keys()
            different = [name for name in ours if ours[name] != theirs[name]]
            assert not different, f"differ: {different}"

    def _run(self, slot: Slot, run_dir: Path, own: Sequence[Mapping[str, str]]) -> list[tuple[int, str]]:
        """Run the command, with an environment for each rank; (status, end of what it said) of each."""
        flags: dict[str, Any] = {**TINY, **self.flags, "load": run_dir}
        common = {**os.environ, "OMP_NUM_THREADS": "1"}
        if slot.server is not None:
            if not slot.server.alive:
                slot.server.start()
                slot.server.wait()
            flags |= {
                "rollout_engine": "http",
                "rollout_external_engine_addrs": slot.server.url.removeprefix("http://"),
            }
            common["KILL_PID"] = str(slot.server.pid)
        if self.ranks > 1:
            flags = {"train_backend": "embedded", "actor_num_gpus_per_node": self.ranks, "device": "cpu", **flags}
            common |= {"WORLD_SIZE": str(self.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        argv = ["train", *self.tiny.argv(run_dir, **flags)]

        def one(rank: int) -> tuple[int, str]:
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if self.ranks > 1 else {}
            done = slot.zygotes[rank].run(argv, {**common, **place, **own[rank]}, DEADLINE_S, BEFORE)
            return done.returncode, done.stderr[-2000:]

        with ThreadPoolExecutor(self.ranks) as pool:
            return list(pool.map(one, range(self.ranks)))

    def summary(self) -> str:
        """Kill points per kind, and the seconds they took."""
        kinds = ", ".join(f"{kind} {number}" for kind, number in sorted(self.done.items()))
        return f"{sum(self.done.values())} kills in {self.seconds:.0f} s: {kinds}"


def ledger_problems(run_dir: Path) -> list[str]:
    """What `slime ledger verify` finds."""
    commit = find(run_dir)
    assert commit is not None
    return verify(read_history(commit)).problems


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The recorded metrics without what depends on the clock, a mapping per step.

    An evaluation that a drain cut short is made up for by the resumed run, in a line of its own of the same step.
    """
    steps: dict[int, dict[str, Any]] = {}
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        found = {k: v for k, v in json.loads(line).items() if not k.startswith("perf/")}
        known = steps.setdefault(found["step"], {"step": found["step"]})
        assert known.keys() & found.keys() == {"step"}, f"recorded twice: {known.keys() & found.keys()}"
        known |= found
    return list(steps.values())


def files(run_dir: Path) -> dict[str, bytes]:
    """The last commit: weights, optimizer, RNG, data cursor."""
    root = max((run_dir / "checkpoints").glob(f"rollout_{ROLLOUTS - 1:07d}*"))
    paths = [p for p in root.rglob("*") if p.is_file() and p.name not in NOT_COMPARED]
    return {str(p.relative_to(root)): p.read_bytes() for p in paths}
