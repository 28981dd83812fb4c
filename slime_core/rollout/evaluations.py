"""Evaluations in a rollout stage's event loop, which end at a drain and at `--eval-timeout`.

`RolloutStage` runs every evaluation function that is a coroutine here. An evaluation draws nothing from the data
source, so it gives nothing back: its generated samples are discarded, and a resumed run repeats it. A plain function
cannot be cancelled: the stage waits for it, and at the deadline the process ends.
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
"""Seconds that interrupted work has to stop its requests before the engine is stopped."""
TIMEOUT = "the run stops (--eval-timeout)"


class Interruptible:
    """Work in an event loop that is cancelled when the run stops."""

    def __init__(self) -> None:
        self.interrupted = False
        """True once no more work may begin."""
        self._running: set[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = set()

    def interrupt(self) -> None:
        """Cancel running and later work at its next await; any thread and a signal handler may call this."""
        self.interrupted = True
        for loop, task in tuple(self._running):
            loop.call_soon_threadsafe(task.cancel)

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Await the work and return its result. Raises RolloutInterrupted if `interrupt` cancelled it."""
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
    """Run an evaluation and return its result; with `--eval-in-background` it may run during a rollout.

    Raises:
        RolloutInterrupted: The evaluation was interrupted.
        RolloutError: The evaluation did not finish within `timeout` seconds; the message names the stall report.
    """
    try:
        return await running.run(within(work, what, deadline=timeout, then=TIMEOUT, error=RolloutError))
    finally:
        if inspect.getcoroutinestate(work) == inspect.CORO_CREATED:
            work.close()  # it never started, so Python would warn that it was never awaited


async def cancel_all(tasks: set[asyncio.Task[Any]], then: Callable[[], Awaitable[None]] | None = None) -> None:
    """Cancel rollouts and evaluations, then call `then`.

    They may still run after an interrupt that did not pass through the event loop, or if another thread waits for them.
    """
    running = {task for task in tasks if not task.done()}
    for task in running:
        task.cancel()
    if running:
        with waiting("rollouts and evaluations to end", deadline=_CANCEL_DEADLINE, then="they are left behind"):
            await asyncio.wait(running, timeout=_CANCEL_DEADLINE)
    if then is not None:
        await then()
