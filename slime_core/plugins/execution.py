"""Execution of rewards: the place where a reward runs, its concurrent calls, and its deadline.

A reward declares the place by the trait `execution`; `adapters.RewardCaller` calls `execution_of`::

    inline     on the event loop's thread: trivially fast pure functions only, since everything waits for them
    thread     in this process: shares state with the run; a call that overruns is abandoned, not ended
    process    in a worker process, which is killed if the call overruns; a crash of the call ends only the worker
    async      on the event loop: `async def`, unless it declares "process"

Time spent waiting for a free place does not count against the deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType
from typing import Any

from slime_core.errors import PluginError
from slime_core.protocols import RewardTraits, traits_of

EXECUTIONS = ("inline", "thread", "process")
"""Allowed values of the trait `execution`."""
START_DEADLINE = 60.0
"""Seconds that a new interpreter may take to start."""
LOAD_DEADLINE = 600.0
"""Seconds that importing and building a component may take; a local judge model may be large."""


class DeadlineExceeded(Exception):
    """A call took longer than its deadline; the text names the deadline."""

    left_behind = False
    """True if the call is still running, and may write to its samples."""


def execution_of(obj: Any, label: str, *, is_async: bool, default: str) -> str:
    """Return "inline", "thread", "process" or "async".

    Args:
        obj: Function, class or instance, perhaps with traits.
        label: Begins the error message.
        is_async: Whether calling `obj` returns an awaitable.
        default: Value for a plain component that declares no `execution`.

    Raises:
        PluginError: The trait has another value, or is "thread" for a coroutine.
    """
    declared = traits_of(obj, RewardTraits, label).execution
    if declared is None:
        return "async" if is_async else default
    if declared not in EXECUTIONS:
        raise PluginError(f"{label}: execution = {declared!r}; write one of {', '.join(map(repr, EXECUTIONS))}")
    if is_async and declared == "thread":
        raise PluginError(
            f"{label}: execution = 'thread', but it is async; make it a plain function, or declare 'process'"
        )
    return "async" if is_async and declared == "inline" else declared


@dataclass(frozen=True)
class Component:
    """The data from which a worker loads a reward by itself."""

    spec: str
    group: bool = False
    options: bytes = b""
    """Pickled value of the setting `plugins` for this component; empty to use the run's."""

    @cached_property
    def key(self) -> str:
        """Name of the loaded component within a worker."""
        return f"{self.spec}|{int(self.group)}|{self.options.hex()}"


class Slots:
    """Limit on holders at a time in each event loop; `count=None` means no limit."""

    def __init__(self, count: int | None) -> None:
        self._count = count
        self._of_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]
        self._of_loop = weakref.WeakKeyDictionary()

    def __call__(self) -> AbstractAsyncContextManager[Any]:
        """Return a context manager: `async with slots():` waits for a place in call order, and holds it."""
        if self._count is None:
            return contextlib.nullcontext()
        loop = asyncio.get_running_loop()
        semaphore = self._of_loop.get(loop)
        if semaphore is None:
            semaphore = self._of_loop[loop] = asyncio.Semaphore(self._count)
        return semaphore


class deadline:  # a class, since generators cost as much as the rest of a call that does nothing
    """`async with deadline(seconds, flag):` cancels its block after `seconds` and raises DeadlineExceeded."""

    def __init__(self, seconds: float | None, flag: str) -> None:
        self._seconds, self._flag = seconds, flag
        self._clock = asyncio.timeout(seconds)

    async def __aenter__(self) -> None:
        await self._clock.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._clock.__aexit__(kind, error, trace)
        except TimeoutError:
            raise DeadlineExceeded(overrun(self._seconds, self._flag)) from None


def overrun(seconds: float | None, flag: str) -> str:
    """Return the error text of a missed deadline."""
    return f"no answer within {flag} {seconds} s"
