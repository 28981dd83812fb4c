"""Where user code is called: what it raises becomes one error that names it and its line.

Of rewards, generate functions and sample hooks an error is data: their callers mark the sample, and `contained` and
`awaited` only see to it that what was raised is an error. Everything else a user supplies ends the run when it raises.
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
    """`file:line` of the innermost frame."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.filename}:{frame.lineno}"


def contained(label: str, call: Callable[[], Any]) -> Any:
    """Call; what would end the process, the event loop or a generator becomes the plugin's error."""
    try:
        return call()
    except StopIteration as error:  # no future can hold one: whoever awaited it would wait for ever
        raise _escaped(label, error) from error
    except Exception:
        raise
    except BaseException as error:
        if _is_foreign(error):
            raise
        raise _escaped(label, error) from error


async def awaited(label: str, value: Awaitable[Any]) -> Any:
    """`contained` for the asynchronous part; a cancellation of the waiting task passes."""
    try:
        return await value
    except Exception:
        raise
    except BaseException as error:
        if _is_foreign(error):
            raise
        raise _escaped(label, error) from error


_HANDLERS = ("asyncio.runners", "slime_core.cli.termination")
"""Modules whose signal handlers raise KeyboardInterrupt in whatever code runs."""


def _is_foreign(error: BaseException) -> bool:
    """Whether the exception came to the code from outside: a cancellation of its task, a closed coroutine, a signal."""
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
    """Turn what is raised inside into a PluginError; slime's own errors pass.

    The code has `--user-code-timeout`, unless it is `lasting`: then its parts have deadlines.
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
    """The function with `user_code` around each call; plain stays plain and async stays async."""
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
