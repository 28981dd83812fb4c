"""Calls of user code: in this thread, on a thread that can be abandoned, bounded in number and time.

An exception of user code becomes one error that names the code and its line. An error of a reward, generate function or
sample hook is data: the caller marks the sample, and `contained` and `awaited` only ensure that the exception is an
`Exception`. An exception of any other user code (`user_code`, `guarded`) ends the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import queue
import signal
import threading
import traceback
import weakref
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Any, TypeVar

from slime_core.errors import PluginError, SlimeError
from slime_core.waits import Overdue, user_code_limit, waiting

T = TypeVar("T")
_Jobs = queue.SimpleQueue[tuple[Future[Any], Callable[[], object]]]
_idle: list[_Jobs] = []
"""A queue per thread that waits for a call."""


class DeadlineExceeded(Overdue):
    """A call of user code took longer than the deadline of a flag."""


def overrun(flag: str, seconds: float | None) -> DeadlineExceeded:
    """Return the error of a call that took longer than `flag` allows."""
    return DeadlineExceeded(f"no answer within {flag} {seconds} s")


async def on_thread(call: Callable[[], T]) -> T:
    """Run a plain function on a daemon thread without blocking the event loop, and return its result.

    Cancelling abandons the call: neither the loop nor the end of the process waits for it, as they would for a thread
    of the standard library's pools. Its thread takes other calls if it ever returns. The caller bounds the number.
    """
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()
    try:
        jobs = _idle.pop()
    except IndexError:
        jobs = queue.SimpleQueue()
        threading.Thread(target=_serve, args=(jobs,), name="slime-plugin", daemon=True).start()
    jobs.put((future, call))
    return await asyncio.wrap_future(future)


def _serve(jobs: _Jobs) -> None:
    while True:
        future, call = jobs.get()
        try:
            result = call()
        except BaseException as error:
            _idle.append(jobs)
            future.set_exception(error)
        else:
            _idle.append(jobs)
            future.set_result(result)
            del result
        del future, call


class Slots:
    """Limit on holders at a time in each event loop; `count=None` means no limit."""

    def __init__(self, count: int | None) -> None:
        self.count = count
        self._of_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]
        self._of_loop = weakref.WeakKeyDictionary()

    def __call__(self) -> AbstractAsyncContextManager[object]:
        """Return a context manager: `async with slots():` waits for a place in call order, and holds it."""
        if self.count is None:
            return contextlib.nullcontext()
        loop = asyncio.get_running_loop()
        semaphore = self._of_loop.get(loop)
        if semaphore is None:
            semaphore = self._of_loop[loop] = asyncio.Semaphore(self.count)
        return semaphore


def raised_at(error: BaseException) -> str:
    """Return `file:line` of the innermost frame."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.filename}:{frame.lineno}"


def contained(label: str, call: Callable[[], object]) -> Any:
    """Call; an exception that would end the process, the event loop or a generator becomes a PluginError."""
    try:
        return call()
    except BaseException as error:
        _contain(label, error)
        raise


async def awaited(label: str, value: Awaitable[object]) -> Any:
    """Await a value as `contained` calls; a cancellation of the waiting task is raised unchanged."""
    try:
        return await value
    except BaseException as error:
        _contain(label, error)
        raise


def _contain(label: str, error: BaseException) -> None:
    # A future cannot hold StopIteration, so awaiting the future would never return.
    if isinstance(error, StopIteration) or not (isinstance(error, Exception) or _is_foreign(error)):
        raise PluginError(f"{label} raised {type(error).__name__}{f'({error})' if str(error) else ''}") from error


_HANDLERS = ("asyncio.runners", "slime_core.launch.drain")
"""Modules whose signal handlers raise KeyboardInterrupt in the running code."""


def _is_foreign(error: BaseException) -> bool:
    """Return whether the exception came from outside the code: a cancelled task, a closed coroutine, a signal."""
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task() if asyncio._get_running_loop() else None
        return task is not None and task.cancelling() > 0
    if not isinstance(error, KeyboardInterrupt):
        return isinstance(error, GeneratorExit)
    if threading.current_thread() is not threading.main_thread():
        return False
    frames = traceback.walk_tb(error.__traceback__)
    from_handler = any(frame.f_globals.get("__name__") in _HANDLERS for frame, _ in frames)
    return from_handler or signal.getsignal(signal.SIGINT) is signal.default_int_handler


@contextmanager
def user_code(label: str, *, lasting: bool = False) -> Iterator[None]:
    """Turn an exception raised inside into a PluginError; slime's own errors are raised unchanged.

    The code's deadline is `--user-code-timeout`, unless it is `lasting`: then its parts have deadlines.
    """
    limit = None if lasting else user_code_limit()
    then = "its parts have deadlines" if lasting else "the process ends (--user-code-timeout)"
    try:
        with waiting(label, deadline=limit, then=then, stop=not lasting):
            yield
    except SlimeError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and _is_foreign(error):
            raise
        said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise PluginError(f"{label} raised {said} (at {raised_at(error)})") from error


def guarded(function: Callable[..., object], label: str, *, lasting: bool = False) -> Callable[..., Any]:
    """Wrap each call of the function in `user_code`; a plain function stays plain, an async one stays async."""
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def call_async(*args: object, **keywords: object) -> object:
            with user_code(label, lasting=lasting):
                return await function(*args, **keywords)

        return call_async

    @functools.wraps(function, updated=("__dict__",) if hasattr(function, "__dict__") else ())
    def call(*args: object, **keywords: object) -> object:
        with user_code(label, lasting=lasting):
            return function(*args, **keywords)

    return call
