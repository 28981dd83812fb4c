"""`LoopThread`: an event loop that always turns, in a thread of its own, so that several threads can use it at once.

The rollout stage of an asynchronous run owns one instead of an `asyncio.Runner`: rollouts, evaluations and weight
updates are called from different threads and take turns in the one loop that the engine lives in::

    generation thread   run(rollout)       --\
    evaluation thread   run(evaluation)    ---+--> one event loop, one thread: engine, generate functions, rewards
    trainer thread      run(weight update) --/

`run` blocks the thread that calls it, so it must not be called in the loop itself; a coroutine of another loop awaits
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
"""Seconds that the thread gets to end after that."""


class LoopThread:
    """Runs coroutines of other threads; with the methods of `asyncio.Runner` that a rollout stage uses."""

    in_real_time: ClassVar[bool] = True
    """False: a simulation, whose loop has a time of its own."""

    def __init__(self, name: str = "slime-rollout-loop") -> None:
        self._name = name
        self._lock = threading.Lock()
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop, which turns from the first use on. Raises RuntimeError once it has been closed."""
        with self._lock:
            if self._closed:
                raise RuntimeError("the rollout stage's event loop has been closed")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._turn, args=(self._loop,), name=self._name, daemon=True)
                self._thread.start()
            return self._loop

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine; its result comes in the future, and cancelling that cancels the coroutine.

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
        """What the coroutine returns; the calling thread waits. An interrupt of that thread cancels the coroutine.

        Raises:
            asyncio.CancelledError: It was cancelled.
        """
        future = self.submit(coroutine)
        try:
            return future.result()
        except CancelledError:
            raise asyncio.CancelledError from None
        except BaseException:
            future.cancel()  # nothing to do when it is the coroutine's own error
            raise

    async def in_thread(self, call: Callable[..., T], *args: Any) -> T:
        """What a blocking call returns, in a thread of its own that nothing waits for when the process ends.

        Cancelling leaves the thread to the end of the call.
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
        """Cancel what runs, then end loop and thread, within CLOSE_DEADLINE + GRACE; safe to call twice.

        A thread that a coroutine blocks is left to end with the process, which is said.
        """
        with self._lock:
            loop, self._loop = self._loop, None
            self._closed = True
        if loop is None or self._thread is None:
            return
        # Made inside the loop: one that never turns again would leave a coroutine that nobody awaits.
        loop.call_soon_threadsafe(lambda: loop.create_task(end_tasks()).add_done_callback(lambda _: loop.stop()))
        self._thread.join(CLOSE_DEADLINE + GRACE)
        if self._thread.is_alive():
            logger.warning("the thread %s did not end within %.0f s; left alone", self._name, CLOSE_DEADLINE + GRACE)
