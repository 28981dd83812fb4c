"""`LoopThread`: an event loop that runs all the time in a thread of its own, shared by several threads.

The rollout stage of an asynchronous run uses it in place of an `asyncio.Runner`. Rollouts, evaluations and weight
updates are called from different threads and share the event loop of the engine::

    generation thread   run(rollout)       --\
    evaluation thread   run(evaluation)    ---+--> one event loop, one thread: engine, generate functions, rewards
    trainer thread      run(weight update) --/

`run` blocks the calling thread, so it must not be called in the loop itself. A coroutine awaits a blocking call with
`in_thread`.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, ClassVar, TypeVar

from slime_core.rollout.deadlines import CLOSE_DEADLINE, end_tasks

T = TypeVar("T")
logger = logging.getLogger(__name__)

GRACE = 2.0
"""Seconds after CLOSE_DEADLINE within which the thread must end."""


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

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
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

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
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

    async def in_thread(self, call: Callable[..., T], *args: Any) -> T:
        """Run a blocking call in a daemon thread of its own and return its result.

        If the wait is cancelled, the thread still finishes the call.
        """
        future: Future[T] = Future()

        def run() -> None:
            try:
                result = call(*args)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        future.set_running_or_notify_cancel()  # from here on, cancelling the wait does not touch the future
        threading.Thread(target=run, name="slime-rollout-stage", daemon=True).start()
        return await asyncio.wrap_future(future)

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
        loop.call_soon_threadsafe(lambda: loop.create_task(end_tasks()).add_done_callback(lambda _: loop.stop()))
        self._thread.join(CLOSE_DEADLINE + GRACE)
        if self._thread.is_alive():
            logger.warning("the thread %s did not end within %.0f s; left alone", self._name, CLOSE_DEADLINE + GRACE)
