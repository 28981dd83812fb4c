"""Waits that keep their own deadline: `by_deadline` and `within` for awaitables, `call_within` for calls that block.

At the deadline `within` and `call_within` write a stall report (while the work still stands where it stands), then
raise the error asked for, which names the report. None relies on being obeyed. A coroutine that swallows its
cancellation is left behind after `_GRACE`, a call is left behind in its thread at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from slime_core.waits.stalls import gave_up
from slime_core.waits.table import waiting

T = TypeVar("T")
_GRACE = 3.0
"""Seconds that a cancelled coroutine gets to end; callers that wait for it give more."""


class Overdue(TimeoutError):
    """The deadline of a call has passed."""

    left_behind = False
    """The call is still running, and may write to its arguments."""


async def by_deadline(work: Awaitable[T], seconds: float | None) -> T:
    """Return the result of the awaitable, which runs as a task of its own. Cancelling the caller cancels it.

    Raises:
        Overdue: It is not done after `seconds`, whatever it makes of its cancellation.
    """
    task = asyncio.ensure_future(work)
    await _done(task, seconds)
    if task.done():
        return task.result()
    await _end(task)
    error = Overdue()
    error.left_behind = not task.done()
    raise error


async def within(
    awaitable: Awaitable[T], what: str, *, deadline: float | None, then: str, error: Callable[[str], BaseException]
) -> T:
    """The awaitable's result, waited for by name; at `deadline` seconds a stall report and `error(message)`.

    The awaitable runs as a task of its own. Cancelling the caller cancels it.
    """
    task = asyncio.ensure_future(awaitable)
    with waiting(what, deadline=deadline, then=then):
        await _done(task, deadline)
        if task.done():
            return task.result()
        message = gave_up(what, deadline, then)
        await _end(task)
    raise error(message)


async def _done(task: asyncio.Future[Any], seconds: float | None) -> None:
    """Wait until the task is done or `seconds` have passed, in half of the time that `asyncio.wait` takes.

    Cancelling the caller ends the task.
    """
    loop = asyncio.get_running_loop()
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


async def _end(task: asyncio.Future[Any]) -> None:
    """Cancel the task and wait for its end; its error no longer matters."""
    task.cancel()
    task.add_done_callback(lambda task: task.cancelled() or task.exception())
    try:
        await asyncio.wait({task}, timeout=_GRACE)
    finally:
        leave_behind(task)


def leave_behind(task: asyncio.Future[Any]) -> None:
    """Forget a task that has not ended: neither the end of its loop nor that of the process waits for it.

    Its coroutine is never closed either: code that swallows every exception, GeneratorExit too, would loop for ever.
    """
    if task.done() or not isinstance(task, asyncio.Task):
        return
    import ctypes

    asyncio.tasks._unregister_task(task)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(task))


def call_within(
    call: Callable[[], T], what: str, *, deadline: float | None, then: str, error: Callable[[str], BaseException]
) -> T:
    """`call()` in a daemon thread of its own, waited for by name; at `deadline` a stall report and `error(message)`.

    For user code and libraries that may block for ever. Without a deadline the call is made in this thread. The call
    sees another thread than its caller's: what is bound to a thread (a CUDA device, an event loop) does not fit.
    """
    if deadline is None:
        with waiting(what, deadline=None, then=then):
            return call()
    outcome: list[Any] = []
    failure: list[BaseException] = []
    done = threading.Event()

    def run() -> None:
        try:
            outcome.append(call())
        except BaseException as problem:  # whatever it is, it belongs to the caller
            failure.append(problem)
        finally:
            done.set()

    with waiting(what, deadline=deadline, then=then):
        thread = threading.Thread(target=run, name=f"slime: {what}", daemon=True)
        thread.start()
        if not done.wait(deadline):
            raise error(gave_up(what, deadline, then))
        with contextlib.suppress(RuntimeError):
            thread.join(_GRACE)
    if failure:
        raise failure[0]
    result: T = outcome[0]
    return result
