"""The training loop of `--async`: generation goes on while the trainer trains.

`loop.py` is the plain one; here every verb is awaited, and what is not awaited goes on::

    rollout   | r=0 |   r=1   |   r=2   |         take(r) returns the batch of r; what comes after is being generated
    train           |  r=0  |wait|  r=1  |        wait: `perf/trainer_wait_time`
    push                    ^            ^        every --update-weights-interval rollouts, after before_push()
    evaluate                |----- r=0 ------|    in the background: starts at once after a push, and the next push
                                                  waits for its end, so that it sees one weight version
    save                    ^            ^        after before_save(), so that what is generated ahead is in the commit

What `before_push` and `before_save` wait for is the rollout's business: a stage that generates one rollout ahead waits
for it, so that no rollout is of two versions; one that generates all the time waits for nothing. The launcher decides
where stages live: inline they are threads, under Ray other processes, in the simulation neither. What a reader would
get wrong: metrics of a background evaluation are logged by themselves, later, under the step it belongs to.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from slime_core.errors import RolloutInterrupted
from slime_core.loop import is_due, saves_after
from slime_core.protocols import Args
from slime_core.types import TrainBatch

T = TypeVar("T")
logger = logging.getLogger(__name__)


class AsyncRollout(Protocol):
    """The generation side."""

    async def start(self) -> None:
        """Bring the engines up; nothing is generated yet."""

    async def take(self, rollout_id: int) -> Any:
        """-> object with `.batch: TrainBatch` and `.metrics`; generation of what comes after goes on.

        Raises:
            RolloutInterrupted: The run is to end.
        """

    async def before_push(self) -> None:
        """Wait until the engines may take new weights."""

    async def before_save(self) -> None:
        """Wait until what has been generated ahead can be part of a commit."""

    async def evaluate(self, rollout_id: int) -> dict[str, float]:
        """`eval/...` metrics. Raises RolloutInterrupted when the run is to end."""

    async def stop(self) -> None:
        """Interrupt what is generated, and free the engines; safe to call twice."""


class AsyncLearning(Protocol):
    """The training side."""

    async def train(self, rollout_id: int, batch: TrainBatch) -> dict[str, float]:
        """All optimizer steps of one rollout."""


class AsyncWeights(Protocol):
    """Trained parameters -> engines."""

    async def push(self) -> dict[str, float]:
        """Make the engines serve the newest weights."""


class AsyncJournal(Protocol):
    """What is recorded: metrics, checkpoints, hooks."""

    async def log(self, step: int, metrics: dict[str, float]) -> None:
        """Record metrics under `step` finished rollouts."""

    async def step_end(self, rollout_id: int, metrics: dict[str, float]) -> None:
        """A rollout has been trained on."""

    async def save(self, rollout_id: int) -> None:
        """Commit a checkpoint."""


def _never() -> bool:
    return False


@dataclass
class AsyncStages:
    """The parts of a run."""

    rollout: AsyncRollout
    learner: AsyncLearning
    weights: AsyncWeights
    journal: AsyncJournal
    stop: Callable[[], bool] = _never
    """Whether the run is to end early, with a commit; looked at after each rollout."""
    unfinished: list[int] = field(default_factory=list)
    """Step of the evaluation that a commit made at this moment would miss; none or one. The commit remembers it, and a
    resumed run gives it in here to have it done first."""


async def train(args: Args, stages: AsyncStages, start: int) -> int:
    """Run rollouts `start` to `args.num_rollout`; returns how many are done, fewer when the run was to end early."""
    evaluations = _Evaluations(args, stages)
    try:
        return await _train(args, stages, evaluations, start)
    finally:
        await evaluations.cancel()


async def _train(args: Args, stages: AsyncStages, evaluations: _Evaluations, start: int) -> int:
    saved = None
    await stages.weights.push()
    if start == 0 and args.eval_interval and not args.skip_eval_before_train:
        stages.unfinished[:] = [0]
    for step in list(stages.unfinished):
        metrics = await evaluations.run(step)
        if evaluations.interrupted:
            return start
        await stages.journal.log(step, metrics)
    for rollout_id in range(start, args.num_rollout):
        clock = _Clock()
        try:
            rollout = await clock.waits(stages.rollout.take(rollout_id))
        except RolloutInterrupted as interrupted:
            # What is given back changes the data cursor, so the commit of the last step is made again.
            if rollout_id > 0 and (interrupted.drew or saved != rollout_id - 1):
                await _save(stages, evaluations, rollout_id - 1)
            return rollout_id
        metrics = {**rollout.metrics, **await clock.works(stages.learner.train(rollout_id, rollout.batch))}
        if is_due(args.update_weights_interval, rollout_id, args.num_rollout):
            await clock.waits(evaluations.ended())
            await clock.waits(stages.rollout.before_push())
            metrics |= await clock.works(stages.weights.push())
        if is_due(args.eval_interval, rollout_id, args.num_rollout):
            metrics |= await evaluations.run(rollout_id + 1)
        await stages.journal.step_end(rollout_id, metrics | clock.metrics())
        stops = stages.stop() or evaluations.interrupted
        if stops or saves_after(args, rollout_id):
            await _save(stages, evaluations, rollout_id)
            saved = rollout_id
        if stops:
            return rollout_id + 1
    await evaluations.ended()
    return int(max(start, args.num_rollout))


async def _save(stages: AsyncStages, evaluations: _Evaluations, rollout_id: int) -> None:
    """Commit. An evaluation of these weights may go on; one of older weights could not be done again, so it ends."""
    if stages.unfinished != [rollout_id + 1]:
        await evaluations.ended()
        evaluations.give_up_older()
    await stages.rollout.before_save()
    await stages.journal.save(rollout_id)


class _Clock:
    """What the trainer did with the time of one rollout."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._waited = self._worked = 0.0

    async def waits(self, awaitable: Awaitable[T]) -> T:
        """For a batch, or until the engines can take weights."""
        started = time.perf_counter()
        result = await awaitable
        self._waited += time.perf_counter() - started
        return result

    async def works(self, awaitable: Awaitable[T]) -> T:
        """Trains, or hands over weights."""
        started = time.perf_counter()
        result = await awaitable
        self._worked += time.perf_counter() - started
        return result

    def metrics(self) -> dict[str, float]:
        """Seconds waited, and the part of all time without work; an evaluation in the foreground is such a time."""
        idle = 1.0 - self._worked / (time.perf_counter() - self._started)
        return {"perf/trainer_wait_time": self._waited, "perf/trainer_idle_fraction": idle}


class _Evaluations:
    """One at a time, in the foreground or beside the training."""

    def __init__(self, args: Args, stages: AsyncStages) -> None:
        self._background = args.eval_in_background
        self._stages = stages
        self._task: asyncio.Task[None] | None = None
        self.interrupted = False
        """One was ended before it was done, since the run is to end; it stays in `stages.unfinished`."""

    async def run(self, step: int) -> dict[str, float]:
        """The metrics of the weights that are served; in the background none, since they are logged when known.

        None, too, where the evaluation is interrupted.
        """
        await self.ended()
        self.give_up_older()
        self._stages.unfinished[:] = [step]
        if not self._background:
            metrics = await self._metrics(step)
            if not self.interrupted:
                self._stages.unfinished.clear()
            return metrics
        self._task = asyncio.create_task(self._evaluate(step))
        return {}

    async def _metrics(self, step: int) -> dict[str, float]:
        try:
            return await self._stages.rollout.evaluate(max(step - 1, 0))
        except RolloutInterrupted:
            self.interrupted = True
            return {}

    async def _evaluate(self, step: int) -> None:
        metrics = await self._metrics(step)
        if not self.interrupted:
            await self._stages.journal.log(step, metrics)
            self._stages.unfinished.clear()

    async def ended(self) -> None:
        """Wait for the one in the background, and raise what it raised."""
        if self._task is not None:
            await asyncio.wait({self._task})
            task, self._task = self._task, None
            task.result()

    def give_up_older(self) -> None:
        """One that was interrupted cannot be done again once the run has gone on: say so. Called when none runs."""
        if self.interrupted and self._stages.unfinished:
            step = self._stages.unfinished.pop()
            logger.warning("the evaluation of step %d was interrupted: no metrics of it, nothing has its weights", step)

    async def cancel(self) -> None:
        """The run ends: nobody waits for metrics any more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
