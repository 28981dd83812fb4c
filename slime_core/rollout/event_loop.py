"""Event loops of a rollout stage.

`StageRunner` runs the loop of a synchronous run in the calling thread, only while the stage is called. `LoopThread`
runs the loop of an asynchronous run all the time, in a thread of its own. Rollouts, evaluations and weight updates are
called from different threads and share the event loop of the engine::

    generation thread   run(rollout)       --\\
    evaluation thread   run(evaluation)    ---+--> one event loop, one thread: engine, generate functions, rewards
    trainer thread      run(weight update) --/

`run` blocks the calling thread, so it must not be called in the loop itself. A coroutine awaits a blocking call with
`in_thread`. A plugin measures how late the loop runs (`LoopLag`).
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, ClassVar, Protocol, TypeVar

from slime_core.errors import RolloutError
from slime_core.waits import current, leave_behind
from slime_core.workers.call import on_thread

T = TypeVar("T")
logger = logging.getLogger(__name__)

CLOSE_DEADLINE = 10.0
"""Seconds for the tasks left in an event loop to end once they are cancelled."""
GRACE = 2.0
"""Seconds after CLOSE_DEADLINE within which the thread must end."""


class LoopLag(Protocol):
    """A meter of the lag of one event loop."""

    def follow(self, runner: object) -> None:
        """Start measuring if the runner's loop always runs (a `LoopThread`'s); call it in the loop."""

    def counting(self) -> AbstractContextManager[None]:
        """Measure during a part of a coroutine."""

    def take(self) -> dict[str, float]:
        """Return the metrics since the last call."""


class LoopThread:
    """Runs coroutines for other threads; has the methods of `asyncio.Runner` that a rollout stage uses."""

    in_real_time: ClassVar[bool] = True
    """False for a simulation, whose loop has a virtual clock."""

    def __init__(self, name: str = "slime-rollout-loop") -> None:
        self._name = name
        self._lock = threading.Lock()
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop, started on first use. Raises RuntimeError once it has been closed."""
        with self._lock:
            if self._closed:
                raise RuntimeError("the rollout stage's event loop has been closed")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._turn, args=(self._loop,), name=self._name, daemon=True)
                self._thread.start()
            return self._loop

    def submit(self, coroutine: Coroutine[object, None, T]) -> Future[T]:
        """Start a coroutine and return its future; cancelling the future cancels the coroutine.

        Raises:
            RuntimeError: The loop has been closed.
        """
        try:
            loop = self.loop
        except RuntimeError:
            coroutine.close()
            raise
        assert threading.current_thread() is not self._thread, "the loop cannot wait for itself"
        return asyncio.run_coroutine_threadsafe(coroutine, loop)

    def run(self, coroutine: Coroutine[object, None, T]) -> T:
        """Run a coroutine and return its result, blocking the calling thread.

        An interrupt of the calling thread cancels the coroutine.

        Raises:
            asyncio.CancelledError: The coroutine was cancelled.
        """
        future = self.submit(coroutine)
        try:
            return future.result()
        except CancelledError:
            raise asyncio.CancelledError from None
        except BaseException:
            future.cancel()  # no effect if the coroutine itself raised
            raise

    async def in_thread(self, call: Callable[..., T], *args: object) -> T:
        """Run a blocking call in a daemon thread and return its result.

        If the wait is cancelled, the thread still finishes the call.
        """
        return await on_thread(partial(call, *args))

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
            while not self._closed:
                logger.warning("a function stopped the run's event loop (loop.stop()); it is started again")
                loop.run_forever()
        finally:
            loop.close()

    def close(self) -> None:
        """Cancel running tasks, then end loop and thread, within CLOSE_DEADLINE + GRACE; safe to call twice.

        If a coroutine blocks the thread, log a warning and leave the thread to end with the process.
        """
        with self._lock:
            loop, self._loop = self._loop, None
            self._closed = True
        if loop is None or self._thread is None:
            return
        # Create the coroutine inside the loop: if the loop is blocked, no unawaited coroutine is left over.
        loop.call_soon_threadsafe(lambda: loop.create_task(_end_tasks()).add_done_callback(lambda _: loop.stop()))
        self._thread.join(CLOSE_DEADLINE + GRACE)
        if self._thread.is_alive():
            logger.warning("the thread %s did not end within %.0f s; left alone", self._name, CLOSE_DEADLINE + GRACE)


class StageRunner(asyncio.Runner):  # type: ignore[misc]  # final for typeshed alone
    """A runner of a stage's loop in the calling thread; its end does not wait for tasks that ignore cancellation."""

    _closed = False

    def run(self, coro: Coroutine[object, None, T], *, context: Any = None) -> T:
        """Return the result of the coroutine. Raises RolloutError if a function stops the loop."""
        try:
            return super().run(coro, context=context)
        except RuntimeError as error:
            if "stopped before Future completed" not in str(error):
                raise
            at_work = ", ".join(dict.fromkeys(wait.what for wait in current() if wait.loop is self.get_loop()))
            raise RolloutError(
                f"a function stopped the run's event loop (loop.stop()), which it must not; at work were: {at_work}"
            ) from error

    def close(self) -> None:
        """End what is left in the loop within CLOSE_DEADLINE, then the loop."""
        if not self._closed:
            self._closed = True
            super().run(_end_tasks())
            loop: Any = self.get_loop()
            if loop._default_executor is not None:  # `asyncio.to_thread`: a call that never returns holds up nothing
                loop._default_executor.shutdown(wait=False, cancel_futures=True)
                loop._default_executor = None
        super().close()


async def _end_tasks() -> None:
    """Cancel every other task of the loop and wait for it; then close the loop's async generators."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        _, late = await asyncio.wait(tasks, timeout=CLOSE_DEADLINE)
        for task in late:
            logger.warning("%s did not end within %.0f s of being cancelled", task.get_coro(), CLOSE_DEADLINE)
            leave_behind(task)
    await asyncio.get_running_loop().shutdown_asyncgens()
