"""A rollout stage that generates ahead: `build_async_rollout` picks by `--async-mode` what drives it.

The inline launcher calls it in the process that generates, a Ray launcher in the rollout actor. The stage is the plain
one of runs without `--async`; only its event loop turns in a thread of its own (`loop_thread.LoopThread`), so that a
weight update or an evaluation need not wait for the rollout's end.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeAlias, TypeVar

from slime_core.protocols import Args
from slime_core.rollout.ahead import OneStepAhead
from slime_core.rollout.continuous import ContinuousRollout
from slime_core.rollout.open_groups import OpenGroups
from slime_core.rollout.producer import GroupProducer
from slime_core.rollout.stage import RolloutStage
from slime_core.types import Group, TrainBatch

T = TypeVar("T")


class ThreadedStage:
    """The blocking methods of a `RolloutStage` as coroutines, each call in a thread of its own.

    `stage` turns its event loop in a LoopThread. Cancelling a call leaves its thread to the end of what it calls,
    which `stop` brings about.
    """

    def __init__(self, stage: RolloutStage) -> None:
        self.stage, self._loop = stage, stage.loop_thread()

    @property
    def weight_version(self) -> int:
        """That is served."""
        return self.stage.weight_version

    @property
    def open_groups(self) -> OpenGroups:
        """The stage's."""
        return self.stage.open_groups

    async def start(self) -> None:
        """Bring the engine up."""
        await self._loop.in_thread(self.stage.start)

    async def generate_groups(self, rollout_id: int) -> tuple[list[Group], dict[str, float]]:
        """One rollout and its metrics. Raises RolloutError, RolloutInterrupted."""
        return await self._loop.in_thread(lambda: self.stage.generate_groups(rollout_id))

    async def make_batch(self, rollout_id: int, groups: list[Group], weight_version: int) -> TrainBatch:
        """Groups as the trainer gets them; `weight_version` is the one they will update."""
        return await self._loop.in_thread(lambda: self.stage.make_batch(rollout_id, groups, weight_version))

    def producer(self) -> GroupProducer:
        """What generates without end; once, after `start`."""
        return self.stage.producer()

    async def inside(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Await a coroutine of the stage's event loop."""
        return await self._loop.wait(coroutine)

    async def conclude(
        self, rollout_id: int, groups: list[Group], decided: list[Group], extra: dict[str, float], started: float
    ) -> dict[str, float]:
        """The end of a rollout that was taken from the producer; its metrics."""
        return await self._loop.in_thread(lambda: self.stage.conclude(rollout_id, groups, decided, extra, started))

    async def evaluate(self, rollout_id: int) -> dict[str, float]:
        """`eval/...` metrics."""
        return await self._loop.in_thread(lambda: self.stage.evaluate(rollout_id))

    async def abandon(self) -> None:
        """End every rollout and evaluation; the engine stays."""
        await self._loop.in_thread(self.stage.abandon)

    async def stop(self) -> None:
        """Interrupt what runs and free the engine."""
        await self._loop.in_thread(self.stage.stop)


AheadRollout: TypeAlias = OneStepAhead | ContinuousRollout
"""A rollout of the loop whose verbs are awaited."""


def build_async_rollout(args: Args, stage: RolloutStage) -> AheadRollout:
    """What `loop.train` generates with. `stage` has a `LoopThread` as its runner and has not been started."""
    if args.async_mode == "one-step":
        return OneStepAhead(args, ThreadedStage(stage))
    stage.never_stops = True
    return ContinuousRollout(args, ThreadedStage(stage))
