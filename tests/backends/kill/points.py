"""Events of a run at which something is killed, from inside.

`install`, called in the process before it becomes the command, wraps the functions of `EVENTS`, so that each call is an
event when it begins and one when it ends. Environment variables say what is to happen::

    KILL_LOG=FILE     append the name of every event, one per line
    KILL_AT=NAME#N    act at the N-th event of that name, N from 1
    KILL_HOW=kill     SIGKILL to this process (default)
             worker   SIGKILL to a reward worker of this process, which goes on
             engine   SIGKILL to the process KILL_PID, and go on
             drain    SIGTERM to this process
             drain+N  SIGTERM to this process, SIGKILL at the N-th event after it
    KILL_TOLD=FILE    made when it has been done

The N counts in one process. A resumed run has fewer events than the whole one.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

EVENTS: dict[str, tuple[str, ...]] = {
    # kind -> functions; a name with a dot after the colon is a method
    "start": (
        "slime_core.launch.inline:begin_run_dir",
        "slime_core.rollout.stage:RolloutStage.start",
        "slime_core.launch.drive:restore",
    ),
    "draw": ("slime_core.data.prompts:DatasetSource.get_samples",),
    "give_back": ("slime_core.data.prompts:DatasetSource.add_samples",),
    "generate": ("slime_core.rollout.gate:GatedEngine.generate",),
    "engine_step": ("slime_embedded.engine.core:EngineCore.step",),
    "reward": ("slime_core.rollout.reward:RewardStage.score",),
    "filter": ("slime_core.rollout.fate:FilterStage.decide",),
    "batch": ("slime_core.rollout.stage:make_batch",),
    "advantage": ("slime_core.learning.passes:compute_advantages",),
    "train_step": ("slime_embedded.trainer.trainer:EmbeddedTrainer.train_step",),
    "optimizer": ("slime_embedded.trainer.optimizer:FlatAdamW.step",),
    "push": ("slime_core.weights.sync:WeightSync.push", "slime_core.rollout.stage:RolloutStage.update_weights"),
    "push_tensor": (
        "slime_embedded.trainer.trainer:EmbeddedTrainer.named_weights",
        "slime_embedded.fsdp.trainer:FsdpTrainer._whole_weights",
    ),
    "eval": ("slime_core.rollout.stage:RolloutStage.evaluate",),
    "save_trainer": (
        "slime_embedded.trainer.trainer:EmbeddedTrainer.save",
        "slime_embedded.fsdp.trainer:FsdpTrainer.save",
    ),
    "save_stage": ("slime_core.rollout.stage:RolloutStage.save",),
    "commit": ("slime_core.launch.journal:Journal.save",),
    "commit_file": ("slime_core.checkpoint.store:_write_json", "slime_core.checkpoint.store:_describe"),
    "commit_fsync": ("slime_core.checkpoint.store:flush",),
    "commit_rename": ("os:rename",),
    "commit_pointer": ("slime_core.checkpoint.store:CheckpointStore._point_to",),
    "commit_prune": ("slime_core.checkpoint.store:CheckpointStore._prune", "shutil:rmtree"),
    "ledger_segment": ("slime_core.rollout.state:write_segment", "slime_core.data.ledger_files:flush"),
    "metrics": ("slime_core.checkpoint.run_dir:JsonlTracker.slime_log_metrics",),
    "step_end": ("slime_core.launch.journal:Journal.step_end",),
    "finish": ("slime_core.launch.journal:Journal.finish",),
}


class _Counter:
    """Counts events, and acts at the one that was asked for."""

    def __init__(self) -> None:
        self._log = os.environ.get("KILL_LOG")
        name, _, number = os.environ.get("KILL_AT", "#0").partition("#")
        self._at = name, int(number)
        self._how, _, then = os.environ.get("KILL_HOW", "kill").partition("+")
        self._then = int(then or 0)
        self._left = 0
        self._seen: Counter[str] = Counter()
        self._owner = os.getpid()
        self._lock = threading.RLock()

    def event(self, name: str) -> None:
        """One has happened."""
        if os.getpid() != self._owner:
            return
        with self._lock:
            self._seen[name] += 1
            if self._log:
                with Path(self._log).open("a") as file:
                    file.write(name + "\n")
            if self._left:
                self._left -= 1
                if not self._left:
                    os.kill(self._owner, signal.SIGKILL)
            if (name, self._seen[name]) == self._at:
                Path(os.environ["KILL_TOLD"]).touch()
                self._act()

    def _act(self) -> None:
        if self._how == "drain":
            os.kill(self._owner, signal.SIGTERM)
            self._left = self._then
        elif self._how == "worker":
            os.kill(_reward_workers()[0], signal.SIGKILL)
        else:
            victim = int(os.environ["KILL_PID"]) if self._how == "engine" else self._owner
            os.kill(victim, signal.SIGKILL)


def _reward_workers() -> list[int]:
    """Processes that compute rewards for this one."""
    children: list[str] = []
    for path in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # that thread has ended; its children are another's
            children += path.read_text().split()
    return [
        int(pid) for pid in children if b"slime_rewards.processes.scoring" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


def install() -> None:
    """Wrap every function of `EVENTS` in this process."""
    counter = _Counter()
    if os.environ.get("KILL_HOW") == "engine":  # nobody starts it again, so no run need wait for that
        importlib.import_module("slime_engine_http.servers").COMEBACK_S = 2.0  # type: ignore[attr-defined]
    for kind, targets in EVENTS.items():
        for target in targets:
            module, path = target.split(":")
            owner: Any = importlib.import_module(module)
            *classes, name = path.split(".")
            for part in classes:
                owner = getattr(owner, part)
            setattr(owner, name, _wrapped(getattr(owner, name), f"{kind}.{name.strip('_')}", counter))


def _wrapped(function: Callable[..., Any], name: str, counter: _Counter) -> Callable[..., Any]:
    """The function with an event at its beginning and its end; each item of a generator is one, too."""
    if inspect.isgeneratorfunction(function):

        @functools.wraps(function)
        def generating(*args: Any, **kwargs: Any) -> Iterator[Any]:
            for item in function(*args, **kwargs):
                counter.event(f"{name}:item")
                yield item

        return generating
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def awaiting(*args: Any, **kwargs: Any) -> Any:
            counter.event(f"{name}:begin")
            result = await function(*args, **kwargs)
            counter.event(f"{name}:end")
            return result

        return awaiting

    @functools.wraps(function)
    def calling(*args: Any, **kwargs: Any) -> Any:
        counter.event(f"{name}:begin")
        result = function(*args, **kwargs)
        counter.event(f"{name}:end")
        return result

    return calling


def kind_of(point: str) -> str:
    """The kind of an event or a point; with `@1`, one in rank 1."""
    name = point.partition("#")[0]
    return name.split(".")[0] + "".join(name.partition("@")[1:])


def spread(events: Counter[str], count: int) -> list[str]:
    """`count` points, `NAME#N`: every kind as often as any other, over all its names and their numbers."""
    kinds: dict[str, list[str]] = {}
    for name, number in events.items():
        kinds.setdefault(kind_of(name), []).extend(f"{name}#{n}" for n in range(1, number + 1))
    # When there are more kinds than points, those are left out that lie between others.
    order = sorted(kinds, key=lambda kind: (list(kinds).index(kind) * 7) % len(kinds))
    chosen: list[str] = []
    quota = dict.fromkeys(order, 0)
    while sum(quota.values()) < min(count, sum(map(len, kinds.values()))):
        free = [kind for kind in order if quota[kind] < len(kinds[kind])]
        quota[min(free, key=quota.__getitem__)] += 1
    for kind, points in kinds.items():
        points.sort(key=lambda point: (int(point.split("#")[1]), point))
        step = len(points) / quota[kind] if quota[kind] else 0
        chosen += [points[int((i + 0.5) * step)] for i in range(quota[kind])]
    return chosen
