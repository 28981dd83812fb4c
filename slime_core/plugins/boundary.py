"""Where user code is called: what it raises becomes one error that names it and its line.

Rewards and generate functions have their own boundary (`adapters.py`), since there an error is data; everything else a
user supplies ends the run when it raises.
"""

from __future__ import annotations

import functools
import inspect
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from slime_core.errors import PluginError, SlimeError


def raised_at(error: BaseException) -> str:
    """`file:line` of the innermost frame."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.filename}:{frame.lineno}"


@contextmanager
def user_code(label: str) -> Iterator[None]:
    """Turn what is raised inside into a PluginError; slime's own errors pass."""
    try:
        yield
    except SlimeError:
        raise
    except Exception as error:
        raise PluginError(f"{label} raised {type(error).__name__}: {error} (at {raised_at(error)})") from error


def guarded(function: Callable[..., Any], label: str) -> Callable[..., Any]:
    """The function with `user_code` around each call; plain stays plain and async stays async."""
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def call_async(*args: Any, **keywords: Any) -> Any:
            with user_code(label):
                return await function(*args, **keywords)

        return call_async

    @functools.wraps(function, updated=("__dict__",) if hasattr(function, "__dict__") else ())
    def call(*args: Any, **keywords: Any) -> Any:
        with user_code(label):
            return function(*args, **keywords)

    return call


class GuardedHooks:
    """pluggy's hook relay with `user_code` around each hook call."""

    def __init__(self, relay: Any) -> None:
        self._relay = relay

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return guarded(getattr(self._relay, name), f"a plugin's hook {name}")
