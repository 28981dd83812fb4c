"""`--offload`: trainer and engines share devices, so each frees its memory while the other works.

`offloading` wraps two of the loop's stage methods, on every process of the trainer and for every launcher; the loop
does not change::

    generate -> [engines release, trainer onload] -> train -> [trainer offload, engines resume weights] -> push
             -> [engines resume KV cache] -> evaluate, save, generate

`settle_offload` decides before anything starts whether the run's components support offloading. The trainer is
offloaded while the engines generate and while a checkpoint is written; it saves its state from host memory or device
memory, wherever the state is. Before the first push nothing has been released, and the engines hold the weights that
they loaded.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from slime_core.config import Settings
from slime_core.launch.components import Components
from slime_core.loop import Stages
from slime_core.protocols import Args, EngineTraits, TrainerTraits, traits_of
from slime_core.sample import TrainBatch

if TYPE_CHECKING:
    from slime_core.launch.follow import LedTrainers
    from slime_core.launch.trainers import Trainers

logger = logging.getLogger(__name__)

OFFLOAD_TIME, ONLOAD_TIME = "perf/offload_time", "perf/onload_time"


def settle_offload(settings: Settings, parts: Components) -> None:
    """Turn off the offload settings whose component is missing or cannot offload; warn about defaulted settings."""
    args = settings.args
    sides = (
        ("offload_rollout", parts.engine, "rollout_engine", traits_of(parts.engine, EngineTraits).uses),
        ("offload_train", parts.trainer, "train_backend", traits_of(parts.trainer, TrainerTraits).uses),
    )
    for name, part, chosen, uses in sides:
        if not getattr(args, name) or name in uses:
            continue
        flag = name.replace("_", "-")
        if part is not None and not settings.is_given(name):  # if the user gave it, `uses` has been checked before
            logger.warning("--%s, from %s: %s keeps its memory", flag, settings.origins[name], settings.cite(chosen))
        settings.derive(name, False, chosen)


def make_room(args: Args, trainers: Trainers | LedTrainers) -> None:
    """Offload the trainers before the engines start, so that these see their memory; also before a loop restarts."""
    if args.offload_train:
        trainers.offload()


def offloading(args: Args, stages: Stages, trainers: Trainers | LedTrainers) -> Stages:
    """Return the stages with `train` and `push` wrapped, or unchanged if nothing is offloaded.

    Args:
        args: The run's settings.
        stages: Stages of the loop; `rollout` is a `rollout.stage.RolloutStage`, or has its memory methods.
        trainers: Trainers of this process, or the `LedTrainers` that stand for all processes.
    """
    if not (args.offload_train or args.offload_rollout):
        return stages
    rollout: Any = stages.rollout
    turns = _Turns(stages, rollout if args.offload_rollout else None, trainers if args.offload_train else None)
    return replace(stages, learner=turns, weights=turns)


class _Turns:
    """`loop.Learning` and `loop.Weights` for sides that take turns; a side that keeps its memory is None."""

    def __init__(self, stages: Stages, engines: Any, trainers: Trainers | LedTrainers | None) -> None:
        self._learner, self._weights = stages.learner, stages.weights
        self._engines, self._trainers = engines, trainers
        self._seconds = {OFFLOAD_TIME: 0.0, ONLOAD_TIME: 0.0}

    def train(self, rollout_id: int, batch: TrainBatch) -> Any:
        """Run all optimizer steps of one rollout, while the engines are idle."""
        if self._engines is not None:
            with self._timed(OFFLOAD_TIME):
                self._engines.release_memory()
        if self._trainers is not None:
            with self._timed(ONLOAD_TIME):
                self._trainers.onload()
        metrics = self._learner.train(rollout_id, batch)
        if self._trainers is not None:  # from now on it only sends its weights and saves
            with self._timed(OFFLOAD_TIME):
                self._trainers.offload()
        return metrics

    def push(self) -> dict[str, float]:
        """Push the newest weights; return metrics with `perf/offload_time` and `perf/onload_time` of the whole step."""
        self._resume(("weights",))
        metrics: Any = self._weights.push()
        self._resume(("kv_cache",))
        spent, self._seconds = self._seconds, dict.fromkeys(self._seconds, 0.0)
        return {**metrics, **spent}

    def _resume(self, tags: tuple[str, ...]) -> None:
        if self._engines is not None:
            with self._timed(ONLOAD_TIME):
                self._engines.resume_memory(tags)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._seconds[name] += time.perf_counter() - started
