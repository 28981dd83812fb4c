"""The trainer thread of an asynchronous run: it does all training, weight updates and checkpoints.

::

    main thread      loop.train (a coroutine)
    trainer thread   Learner.train, WeightSync.push, Journal      one call at a time
    stage threads    RolloutStage.generate_groups, evaluate       wait for the loop thread
    loop thread      engine, generate functions, rewards          takes turns (`rollout.event_loop`)

`launch.drive` moves the stages of the loop into this thread. A call cannot be interrupted. `close` waits for the
running call up to a deadline, and then leaves the thread to end with the process.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar

from slime_core.errors import rollout_name
from slime_core.launch.device import current_device, use_device
from slime_core.loop import Stages
from slime_core.sample import TrainBatch
from slime_core.waits import waiting

T = TypeVar("T")
logger = logging.getLogger(__name__)

CLOSE_DEADLINE = 30.0
"""Seconds to wait for the running call when the thread is closed."""


class TrainerThread:
    """A thread that runs calls in the order in which they are queued."""

    def __init__(self) -> None:
        self._queue: queue.Queue[tuple[Future[Any], Callable[[], Any]] | None] = queue.Queue()
        self._device = current_device()
        self._thread = threading.Thread(target=self._work, name="slime-trainer", daemon=True)
        self._thread.start()

    def stages(self, stages: Stages) -> Stages:
        """Return a copy of the stages whose learner, weights and journal run in this thread, beside the loop."""
        beside = _InThread(self, stages)
        return replace(stages, learner=beside, weights=beside, journal=beside)

    async def call(self, what: str, fn: Callable[[], T]) -> T:
        """Run `fn` in the thread and return its result; raise any exception of `fn`. `what` names the wait."""
        future: Future[T] = Future()
        self._queue.put((future, fn))
        with waiting(what, deadline=None, then="its own deadline: --train-timeout, --weight-push-timeout, ..."):
            return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Wait for the calls up to `CLOSE_DEADLINE` and end the thread; safe to call twice."""
        self._queue.put(None)
        self._thread.join(CLOSE_DEADLINE)
        if self._thread.is_alive():
            logger.warning("the trainer's call did not end within %.0f s; left alone", CLOSE_DEADLINE)

    def _work(self) -> None:
        use_device(self._device)
        while (item := self._queue.get(timeout=None)) is not None:
            future, fn = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = fn()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
            del item, future, fn


class _InThread:
    """Learner, weights and journal whose methods run in the trainer thread."""

    def __init__(self, thread: TrainerThread, stages: Stages) -> None:
        self._call, self._stages = thread.call, stages

    async def train(self, rollout_id: int, batch: TrainBatch) -> dict[str, float]:
        """Run all optimizer steps of one rollout."""
        learner: Any = self._stages.learner
        found: dict[str, float] = await self._call(
            f"training on {rollout_name(rollout_id)}", lambda: learner.train(rollout_id, batch)
        )
        return found

    async def push(self) -> dict[str, float]:
        """Make the engines serve the newest weights."""
        weights: Any = self._stages.weights
        found: dict[str, float] = await self._call("the weight update", weights.push)
        return found

    async def log(self, step: int, metrics: dict[str, float]) -> None:
        """Record metrics under `step` finished rollouts."""
        await self._call("the journal", lambda: self._stages.journal.log(step, metrics))

    async def step_end(self, rollout_id: int, metrics: dict[str, float]) -> None:
        """Record that training on a rollout is done."""
        await self._call("the journal", lambda: self._stages.journal.step_end(rollout_id, metrics))

    async def save(self, rollout_id: int) -> None:
        """Commit a checkpoint."""
        await self._call(f"the commit of {rollout_name(rollout_id)}", lambda: self._stages.journal.save(rollout_id))
