"""Wait for an awaitable with a deadline: `by_deadline`, and `within`, which records the wait by name.

At the deadline `within` writes a stall report, while the work still runs, and then raises an error that names the
report. A coroutine that swallows its cancellation is left behind after `_GRACE`. Another thread is interrupted by
`raise_in`: CPython raises the exception at the thread's next bytecode.
"""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import Awaitable, Callable
from typing import TypeVar

from slime_core.waits.table import gave_up, waiting

T = TypeVar("T")
_GRACE = 3.0
"""Seconds that a cancelled coroutine gets to end; callers that wait for it give more."""


class Overdue(TimeoutError):
    """The deadline of a call has passed."""

    left_behind = False
    """The call is still running, and may write to its arguments."""


async def by_deadline(work: Awaitable[T], seconds: float | None, overdue: Callable[[], BaseException] = Overdue) -> T:
    """Return the result of the awaitable, which runs as a task of its own. Cancelling the caller cancels it.

    A future and a timer take a fifth less time than `asyncio.wait`.

    Raises:
        BaseException: The result of `overdue`, called after `seconds` while the work still runs. It is raised even if
            the work swallows its cancellation.
    """
    task, loop = asyncio.ensure_future(work), asyncio.get_running_loop()
    woken = loop.create_future()

    def wake(_: object = None) -> None:
        if not woken.done():
            woken.set_result(None)

    task.add_done_callback(wake)
    timer = None if seconds is None else loop.call_later(seconds, wake)
    try:
        await woken
    except BaseException:
        await _end(task)
        raise
    finally:
        if timer is not None:
            timer.cancel()
    if task.done():
        return task.result()
    error = overdue()
    await _end(task)
    if isinstance(error, Overdue):
        error.left_behind = not task.done()
    raise error


async def within(
    awaitable: Awaitable[T], what: str, *, deadline: float | None, then: str, error: Callable[[str], BaseException]
) -> T:
    """Await by name as `by_deadline` does; at `deadline` seconds write a stall report and raise `error(message)`."""
    with waiting(what, deadline=deadline, then=then):
        return await by_deadline(awaitable, deadline, lambda: error(gave_up(what, deadline, then)))


async def _end(task: asyncio.Future[T]) -> None:
    """Cancel the task and wait for its end; its error no longer matters."""
    task.cancel()
    task.add_done_callback(lambda task: task.cancelled() or task.exception())
    try:
        await asyncio.wait({task}, timeout=_GRACE)
    finally:
        leave_behind(task)


def leave_behind(task: asyncio.Future[T]) -> None:
    """Forget a task that has not ended: neither the end of its loop nor that of the process waits for it.

    Its coroutine is never closed either: code that swallows every exception, GeneratorExit too, would loop for ever.
    """
    if task.done() or not isinstance(task, asyncio.Task):
        return
    asyncio.tasks._unregister_task(task)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(task))


def raise_in(thread: int, error: type[BaseException]) -> None:
    """Raise an exception of this class in the thread with that identifier, if there is one."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error))


def take_late(error: type[BaseException]) -> None:
    """Take an exception that `raise_in` may have raised in this thread too late for the code it was meant for.

    It is raised here and caught. CPython's own way to cancel it leaves its request for a check set, and 3.11 then hangs
    in the next function that a profiler watches.
    """
    try:
        raise_in(threading.get_ident(), error)
        while True:
            pass
    except error:
        return
