"""Calls of user code: an exception that it raises becomes one error that names the code and its line.

An error of a reward, generate function or sample hook is data: the caller marks the sample, and `contained` and
`awaited` only ensure that the exception is an `Exception`. An exception of any other user code ends the run.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import signal
import threading
import traceback
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from slime_core.errors import PluginError, SlimeError
from slime_core.waits import user_code_limit, waiting


def raised_at(error: BaseException) -> str:
    """Return `file:line` of the innermost frame."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.filename}:{frame.lineno}"


def contained(label: str, call: Callable[[], Any]) -> Any:
    """Call; an exception that would end the process, the event loop or a generator becomes a PluginError."""
    try:
        return call()
    except StopIteration as error:  # a future cannot hold it, so awaiting the future would never return
        raise _escaped(label, error) from error
    except Exception:
        raise
    except BaseException as error:
        if _is_foreign(error):
            raise
        raise _escaped(label, error) from error


async def awaited(label: str, value: Awaitable[Any]) -> Any:
    """Await a value as `contained` calls; a cancellation of the waiting task is raised unchanged."""
    try:
        return await value
    except Exception:
        raise
    except BaseException as error:
        if _is_foreign(error):
            raise
        raise _escaped(label, error) from error


_HANDLERS = ("asyncio.runners", "slime_core.cli.termination")
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


def _escaped(label: str, error: BaseException) -> PluginError:
    return PluginError(f"{label} raised {type(error).__name__}{f'({error})' if str(error) else ''}")


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


def guarded(function: Callable[..., Any], label: str, *, lasting: bool = False) -> Callable[..., Any]:
    """Wrap each call of the function in `user_code`; a plain function stays plain, an async one stays async."""
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def call_async(*args: Any, **keywords: Any) -> Any:
            with user_code(label, lasting=lasting):
                return await function(*args, **keywords)

        return call_async

    @functools.wraps(function, updated=("__dict__",) if hasattr(function, "__dict__") else ())
    def call(*args: Any, **keywords: Any) -> Any:
        with user_code(label, lasting=lasting):
            return function(*args, **keywords)

    return call
