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
from typing import TYPE_CHECKING, Any

from slime_core.config import Settings
from slime_core.launch.components import Components
from slime_core.loop import Stages
from slime_core.protocols import Args, EngineTraits, TrainerTraits, traits_of
from slime_core.types import TrainBatch

if TYPE_CHECKING:
    from slime_core.launch.follow import LedTrainers
    from slime_core.launch.trainers import Trainers

logger = logging.getLogger(__name__)

OFFLOAD_TIME, ONLOAD_TIME = "perf/offload_time", "perf/onload_time"


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


def make_room(args: Args, trainers: Trainers | LedTrainers) -> None:
    """Before the engines start, which then find the memory that they will have; also before a loop that begins anew."""
    if args.offload_train:
        trainers.offload()


def offloading(args: Args, stages: Stages, trainers: Trainers | LedTrainers) -> Stages:
    """The stages, with `train` and `push` as above; the same ones when nothing is offloaded.

    Args:
        args: The run's settings.
        stages: Of the loop; `rollout` is a `rollout.stage.RolloutStage`, or has its methods for memory.
        trainers: Of this process, or the stand-in for all of them.
    """
    if not (args.offload_train or args.offload_rollout):
        return stages
    rollout: Any = stages.rollout
    turns = _Turns(stages, rollout if args.offload_rollout else None, trainers if args.offload_train else None)
    return replace(stages, learner=turns, weights=turns)


class _Turns:
    """`loop.Learning` and `loop.Weights` of sides that take turns; None where one keeps its memory."""

    def __init__(self, stages: Stages, engines: Any, trainers: Trainers | LedTrainers | None) -> None:
        self._learner, self._weights = stages.learner, stages.weights
        self._engines, self._trainers = engines, trainers
        self._seconds = {OFFLOAD_TIME: 0.0, ONLOAD_TIME: 0.0}

    def train(self, rollout_id: int, batch: TrainBatch) -> Any:
        """All optimizer steps of one rollout; meanwhile the engines have nothing to do."""
        if self._engines is not None:
            with self._timed(OFFLOAD_TIME):
                self._engines.release_memory()
        if self._trainers is not None:
            with self._timed(ONLOAD_TIME):
                self._trainers.onload()
        metrics = self._learner.train(rollout_id, batch)
        if self._trainers is not None:  # from now on it only hands its weights over and saves
            with self._timed(OFFLOAD_TIME):
                self._trainers.offload()
        return metrics

    def push(self) -> dict[str, float]:
        """Make the engines serve the newest weights; `perf/offload_time` and `perf/onload_time` of the whole step."""
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
