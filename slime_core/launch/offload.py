"""`--offload`: trainer and engines share devices, so each gives its memory up while the other works.

`offloading` puts itself around two of the loop's verbs, on every process of the trainer and for every launcher; the
loop does not change::

    generate -> [engines release, trainer onload] -> train -> [trainer offload, engines resume weights] -> push
             -> [engines resume KV cache] -> evaluate, save, generate

`settle_offload` decides before anything starts whether the run's components can do it. While it generates the trainer
is offloaded, and a checkpoint is written then, too; a trainer saves from where its state is. In the first push nothing
has been released, and the engines have what they loaded.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

from slime_core.config import Settings
from slime_core.launch.components import Components
from slime_core.loop import Stages
from slime_core.protocols import Args, EngineTraits, TrainerTraits, traits_of
from slime_core.types import TrainBatch

logger = logging.getLogger(__name__)

WEIGHTS = ("weights",)
REST = ("kv_cache",)
OFFLOAD_TIME, ONLOAD_TIME = "perf/offload_time", "perf/onload_time"


class Engines(Protocol):
    """The generation side, as far as its memory goes (`rollout.stage.RolloutStage`)."""

    def release_memory(self) -> None:
        """Give the memory of weights and KV cache up; nothing where it is."""

    def resume_memory(self, tags: tuple[str, ...]) -> None:
        """Take a part of it again; nothing where it is there."""


class TrainingProcesses(Protocol):
    """The training side (`launch.trainers.Trainers`)."""

    def offload(self) -> None:
        """Give up what only training needs; returns when all processes have."""

    def onload(self) -> None:
        """Take it again."""


def settle_offload(settings: Settings, parts: Components) -> None:
    """Turn off what the components cannot do, or what there is nobody to do it for, with a warning."""
    args = settings.args
    sides = (
        ("offload_rollout", parts.engine, "rollout_engine", traits_of(parts.engine, EngineTraits).uses),
        ("offload_train", parts.trainer, "train_backend", traits_of(parts.trainer, TrainerTraits).uses),
    )
    for name, part, chosen, uses in sides:
        if not getattr(args, name) or name in uses:
            continue
        flag = name.replace("_", "-")
        if part is not None and not settings.is_given(name):  # where the user gave it, `uses` has been asked before
            logger.warning("--%s, from %s: %s keeps its memory", flag, settings.origins[name], settings.cite(chosen))
        settings.derive(name, False, chosen)


def make_room(args: Args, trainers: TrainingProcesses) -> None:
    """Before the engines start, which then find the memory that they will have; also before a loop that begins anew."""
    if args.offload_train:
        trainers.offload()


def offloading(args: Args, stages: Stages, trainers: TrainingProcesses) -> Stages:
    """The stages, with `train` and `push` as above; the same ones when nothing is offloaded.

    Args:
        args: The run's settings.
        stages: Of the loop; `rollout` has the methods of `Engines`.
        trainers: Of this process, or the stand-in for all of them.
    """
    if not (args.offload_train or args.offload_rollout):
        return stages
    rollout: Any = stages.rollout
    turns = _Turns(rollout if args.offload_rollout else None, trainers if args.offload_train else None)
    return replace(
        stages, learner=_OffloadedLearner(stages.learner, turns), weights=_OffloadedWeights(stages.weights, turns)
    )


class _Turns:
    """Whose turn it is. `engines` and `trainers` are None where that side keeps its memory."""

    def __init__(self, engines: Engines | None, trainers: TrainingProcesses | None) -> None:
        self._engines = engines
        self._trainers = trainers
        self._seconds = {OFFLOAD_TIME: 0.0, ONLOAD_TIME: 0.0}

    def begin_training(self) -> None:
        """The engines have nothing to do."""
        if self._engines is not None:
            with self._timed(OFFLOAD_TIME):
                self._engines.release_memory()
        if self._trainers is not None:
            with self._timed(ONLOAD_TIME):
                self._trainers.onload()

    def end_training(self) -> None:
        """The trainer has nothing to do but to hand its weights over and to save."""
        if self._trainers is not None:
            with self._timed(OFFLOAD_TIME):
                self._trainers.offload()

    def take_again(self, tags: tuple[str, ...]) -> None:
        """Give a part of their memory back to the engines, where they have released it."""
        if self._engines is not None:
            with self._timed(ONLOAD_TIME):
                self._engines.resume_memory(tags)

    def take_metrics(self) -> dict[str, float]:
        """Seconds since the last call."""
        found, self._seconds = self._seconds, dict.fromkeys(self._seconds, 0.0)
        return found

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._seconds[name] += time.perf_counter() - started


class _OffloadedLearner:
    """`loop.Learning` that has the devices while it trains."""

    def __init__(self, learner: Any, turns: _Turns) -> None:
        self._learner = learner
        self._turns = turns

    def train(self, rollout_id: int, batch: TrainBatch) -> dict[str, float]:
        """All optimizer steps of one rollout."""
        self._turns.begin_training()
        metrics: dict[str, float] = self._learner.train(rollout_id, batch)
        self._turns.end_training()
        return metrics


class _OffloadedWeights:
    """`loop.Weights` after which the engines have the devices."""

    def __init__(self, weights: Any, turns: _Turns) -> None:
        self._weights = weights
        self._turns = turns

    def push(self) -> dict[str, float]:
        """Make the engines serve the newest weights; `perf/offload_time` and `perf/onload_time` of the whole step."""
        self._turns.take_again(WEIGHTS)
        metrics: dict[str, float] = self._weights.push()
        self._turns.take_again(REST)
        return metrics | self._turns.take_metrics()
