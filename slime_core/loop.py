"""The training loop: start reading here.

    prompts, buffer -> rollout -> reward -> filter -> batch     stages.rollout  (slime_core/rollout/stage.py)
            -> advantages -> loss -> optimizer                  stages.learner  (slime_core/learning/learner.py)
            -> weight sync                                      stages.weights  (slime_core/weights/sync.py)
            -> metrics, checkpoint                              stages.journal  (slime_core/launch/journal.py)

A launcher (`slime_core/launch`) builds the stages and decides where each one runs; the loop does not depend on it. A
stage method either finishes before it returns, or returns an awaitable. In synchronous training every method finishes
before it returns, and nothing is generated ahead. With `--async`, work that is not awaited continues::

    rollout   | r=0 |   r=1   |   r=2   |         generate(r) returns the batch of r; later rollouts are generated
    train           |  r=0  |wait|  r=1  |        wait: `perf/trainer_wait_time`
    push                    ^            ^        every --update-weights-interval rollouts, after before_push()
    evaluate                |----- r=0 ------|    with --eval-in-background: starts after a push, and the next push
                                                  waits for its end, so that it sees one weight version
    save                    ^            ^        after before_save(), so that the commit has the groups generated ahead

The rollout stage decides how long `before_push` and `before_save` wait. With one rollout ahead they wait for it, so
that no rollout mixes two weight versions; if generation never stops, they do not wait. `step` counts finished rollouts:
metrics of rollout r are logged at step r + 1, an evaluation before training at step 0. Metrics of an evaluation in the
background are logged separately when it ends, under the step that was evaluated.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, TypeVar

from slime_core.errors import RolloutInterrupted
from slime_core.protocols import Args
from slime_core.sample import TrainBatch

T = TypeVar("T")
Metrics: TypeAlias = "dict[str, float] | Awaitable[dict[str, float]]"
Done: TypeAlias = "Awaitable[None] | None"
logger = logging.getLogger(__name__)


class Rollout(Protocol):
    """The generation side. `generate` and `evaluate` raise RolloutInterrupted when the run is stopping."""

    def start(self) -> Done:
        """Start the engines, without generating anything."""

    def generate(self, rollout_id: int) -> object:
        """Return an object with `.batch: TrainBatch` and `.metrics`; later rollouts may still be generated."""

    def before_push(self) -> Done:
        """Wait until the engines may take new weights."""

    def before_save(self) -> Done:
        """Wait until the samples generated ahead can be part of a commit."""

    def evaluate(self, rollout_id: int) -> Metrics:
        """Evaluate and return `eval/...` metrics."""

    def stop(self) -> Done:
        """Interrupt generation and free the engines; safe to call twice."""


class Learning(Protocol):
    """The training side."""

    def train(self, rollout_id: int, batch: TrainBatch) -> Metrics:
        """Run all optimizer steps of one rollout."""


class Weights(Protocol):
    """The weight sync: it sends trained parameters to the engines."""

    def push(self) -> Metrics:
        """Make the engines serve the newest weights."""


class Journal(Protocol):
    """The records of a run: metrics, checkpoints, hooks."""

    def log(self, step: int, metrics: dict[str, float]) -> Done:
        """Record metrics under `step` finished rollouts."""

    def step_end(self, rollout_id: int, metrics: dict[str, float]) -> Done:
        """Record that training on a rollout is done."""

    def save(self, rollout_id: int) -> Done:
        """Commit a checkpoint."""


@dataclass
class Stages:
    """The parts of a run."""

    rollout: Rollout
    learner: Learning
    weights: Weights
    journal: Journal
    stop: Callable[[], bool] = lambda: False
    """Function that returns whether to end the run early, with a commit; called after each rollout."""
    unfinished: list[int] = field(default_factory=list)
    """Step of an evaluation that has not finished yet, or empty. A commit stores it, and a resumed run passes it here
    to repeat this evaluation first."""


def now(work: Coroutine[object, None, T]) -> T:
    """Run the coroutine of `train` without an event loop, for stages whose methods return no awaitables."""
    try:
        work.send(None)
    except StopIteration as done:
        value: T = done.value
        return value
    work.close()
    raise RuntimeError("a stage method returned an awaitable that waits, but no event loop runs (see --async)")


async def answer(found: object) -> Any:
    """Await the value if it is awaitable, and return the result."""
    return await found if inspect.isawaitable(found) else found


async def train(args: Args, stages: Stages, start: int) -> int:
    """Run rollouts `start` to `args.num_rollout`. Returns the number of finished rollouts, fewer if stopped early."""
    evaluations = _Evaluations(args, stages)
    try:
        return await _train(args, stages, evaluations, start)
    finally:
        await evaluations.cancel()


async def _train(args: Args, stages: Stages, evaluations: _Evaluations, start: int) -> int:
    saved = None
    await answer(stages.weights.push())
    if start == 0 and args.eval_interval and not args.skip_eval_before_train:
        stages.unfinished[:] = [0]
    for step in list(stages.unfinished):
        metrics = await evaluations.run(step)
        if evaluations.interrupted:
            return start
        await answer(stages.journal.log(step, metrics))
    saving = _SaveClock(args)
    for rollout_id in range(start, args.num_rollout):
        clock = _Clock()
        try:
            rollout = await clock.waits(stages.rollout.generate, rollout_id)
        except RolloutInterrupted as interrupted:
            # The drawn groups are in the buffer again, and the data cursor has moved: rewrite the last commit.
            if rollout_id > 0 and (interrupted.drew or saved != rollout_id - 1):
                await _save(stages, evaluations, rollout_id - 1)
            return rollout_id
        metrics = {**rollout.metrics, **await clock.works(stages.learner.train, rollout_id, rollout.batch)}
        if is_due(args.update_weights_interval, rollout_id, args.num_rollout):
            await clock.waits(evaluations.ended)
            await clock.waits(stages.rollout.before_push)
            metrics |= await clock.works(stages.weights.push)
        if is_due(args.eval_interval, rollout_id, args.num_rollout):
            metrics |= await evaluations.run(rollout_id + 1)
        if args.async_training:
            metrics |= clock.metrics()
        await answer(stages.journal.step_end(rollout_id, metrics))
        stops = stages.stop() or evaluations.interrupted
        if stops or saves_after(args, rollout_id) or saving.is_due():
            await _save(stages, evaluations, rollout_id)
            saved = rollout_id
            saving.done()
        if stops:
            return rollout_id + 1
    await evaluations.ended()
    return int(max(start, args.num_rollout))


def is_due(interval: int | None, rollout_id: int, num_rollout: int) -> bool:
    """Return true every `interval` rollouts and after the last rollout; always false without an interval."""
    return bool(interval) and ((rollout_id + 1) % interval == 0 or rollout_id + 1 == num_rollout)  # type: ignore[operator]


def saves_after(args: Args, rollout_id: int) -> bool:
    """Return true every `--save-interval` rollouts, and always after the last, so that final weights are kept."""
    return rollout_id + 1 == args.num_rollout or is_due(args.save_interval, rollout_id, args.num_rollout)


async def _save(stages: Stages, evaluations: _Evaluations, rollout_id: int) -> None:
    """Commit a checkpoint. Await an evaluation of older weights first: a resumed run could not repeat it."""
    if stages.unfinished != [rollout_id + 1]:
        await evaluations.ended()
        evaluations.give_up_older()
    await answer(stages.rollout.before_save())
    await answer(stages.journal.save(rollout_id))


class _SaveClock:
    """Decide after each rollout whether a commit is due by time, if no interval in rollouts is given.

    The clock decides which rollouts are committed, but does not affect training.
    """

    def __init__(self, args: Args) -> None:
        self._seconds = None if args.save_interval else 60 * args.save_minutes
        self._saved = self._asked = time.perf_counter()

    def is_due(self) -> bool:
        """Return whether the next rollout, if it takes as long as this one, would end too late to save after it."""
        before, self._asked = self._asked, time.perf_counter()
        return self._seconds is not None and 2 * self._asked - before - self._saved > self._seconds

    def done(self) -> None:
        """Restart the clock after a commit."""
        self._saved = self._asked = time.perf_counter()


class _Clock:
    """Times that the trainer spent on work and on waiting during one rollout."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._waited = self._worked = 0.0

    async def waits(self, verb: Callable[..., object], *arguments: object) -> Any:
        """Call `verb`, await its result and count the time as waiting (for a batch, or for the engines)."""
        started = time.perf_counter()
        result = await answer(verb(*arguments))
        self._waited += time.perf_counter() - started
        return result

    async def works(self, verb: Callable[..., object], *arguments: object) -> Any:
        """Call `verb`, await its result and count the time as work (training, or sending weights)."""
        started = time.perf_counter()
        result = await answer(verb(*arguments))
        self._worked += time.perf_counter() - started
        return result

    def metrics(self) -> dict[str, float]:
        """Return the seconds waited and the fraction of time without work; foreground evaluation is not work."""
        idle = 1.0 - self._worked / (time.perf_counter() - self._started)
        return {"perf/trainer_wait_time": self._waited, "perf/trainer_idle_fraction": idle}


class _Evaluations:
    """The evaluations of a run, one at a time, in the foreground or in the background."""

    def __init__(self, args: Args, stages: Stages) -> None:
        self._background = args.async_training and args.eval_in_background
        self._stages = stages
        self._task: asyncio.Task[None] | None = None
        self.interrupted = False
        """True if an evaluation was interrupted because the run is stopping; its step stays in `stages.unfinished`."""

    async def run(self, step: int) -> dict[str, float]:
        """Evaluate the weights being served and return the metrics.

        In the background return an empty mapping at once; the metrics are logged when the evaluation ends. Return an
        empty mapping also if the evaluation is interrupted.
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
            metrics: dict[str, float] = await answer(self._stages.rollout.evaluate(max(step - 1, 0)))
            return metrics
        except RolloutInterrupted:
            self.interrupted = True
            return {}

    async def _evaluate(self, step: int) -> None:
        metrics = await self._metrics(step)
        if not self.interrupted:
            await answer(self._stages.journal.log(step, metrics))
            self._stages.unfinished.clear()

    async def ended(self) -> None:
        """Wait for the evaluation in the background, and raise its exception if it failed."""
        if self._task is not None:
            await asyncio.wait({self._task})
            task, self._task = self._task, None
            task.result()

    def give_up_older(self) -> None:
        """Warn of an interrupted evaluation: its weights are gone, so it cannot be repeated. None may be running."""
        if self.interrupted and self._stages.unfinished:
            step = self._stages.unfinished.pop()
            logger.warning("the evaluation of step %d was interrupted; it is not repeated: its weights are gone", step)

    async def cancel(self) -> None:
        """Cancel the evaluation in the background when the run ends."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
