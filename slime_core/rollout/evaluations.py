"""The evaluations that run in a rollout stage's event loop: ended by a drain, and at `--eval-timeout`.

`RolloutStage` runs every evaluation function that is a coroutine in here. Nothing is given back, since an evaluation
draws nothing from the data source; what was generated of it is thrown away, and a resumed run does it again. A plain
function cannot be ended: it is waited for, and at the deadline the process ends.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from slime_core.errors import RolloutError, RolloutInterrupted
from slime_core.waits import waiting, within

T = TypeVar("T")
_CANCEL_DEADLINE = 10.0
"""Seconds interrupted work gets to stop its requests before the engine goes away."""
TIMEOUT = "the run stops (--eval-timeout)"


class Interruptible:
    """Work in an event loop that ends when the run is to end."""

    def __init__(self) -> None:
        self.interrupted = False
        """None is begun any more."""
        self._running: set[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = set()

    def interrupt(self) -> None:
        """End what runs, now and from now on, where it waits; any thread may call it, and a signal handler."""
        self.interrupted = True
        for loop, task in tuple(self._running):
            loop.call_soon_threadsafe(task.cancel)

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """What the work returns. Raises RolloutInterrupted when `interrupt` ended it."""
        task = asyncio.create_task(work)
        entry = (asyncio.get_running_loop(), task)
        self._running.add(entry)
        if self.interrupted:
            task.cancel()
        try:
            return await task
        except asyncio.CancelledError:
            waiter = asyncio.current_task()
            if not self.interrupted or (waiter is not None and waiter.cancelling()):
                raise
            raise RolloutInterrupted(drew=False) from None
        finally:
            self._running.discard(entry)


async def evaluated(running: Interruptible, work: Coroutine[Any, Any, T], what: str, timeout: float | None) -> T:
    """What an evaluation returns; with `--eval-in-background` it may run beside a rollout.

    Raises:
        RolloutInterrupted: It was interrupted.
        RolloutError: It was not done after `timeout` seconds; names the stall report.
    """
    try:
        return await running.run(within(work, what, deadline=timeout, then=TIMEOUT, error=RolloutError))
    finally:
        if inspect.getcoroutinestate(work) == inspect.CORO_CREATED:
            work.close()  # it was not begun, and would be told of as never awaited


async def cancel_all(tasks: set[asyncio.Task[Any]], then: Callable[[], Awaitable[None]] | None = None) -> None:
    """End rollouts and evaluations, then call `then`.

    They run still after an interrupt that did not pass through the event loop, and where another thread waits for them.
    """
    running = {task for task in tasks if not task.done()}
    for task in running:
        task.cancel()
    if running:
        with waiting("rollouts and evaluations to end", deadline=_CANCEL_DEADLINE, then="they are left behind"):
            await asyncio.wait(running, timeout=_CANCEL_DEADLINE)
    if then is not None:
        await then()
