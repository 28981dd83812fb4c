"""The table of waits of this process: `with waiting(...)` adds a row, its end removes it.

Written to by anything that waits, in any thread or task; read by the board, the watchdog and stall reports. A row
costs about a microsecond, so that requests of thousands of samples may each have one. A row ends no
wait at its deadline: it says when the wait's own mechanism ought to have.
"""

from __future__ import annotations

import functools
import time
from asyncio import AbstractEventLoop
from asyncio.events import _get_running_loop
from collections.abc import Callable
from contextvars import ContextVar
from threading import get_ident
from typing import Any, TypeVar

_table: dict[int, Wait] = {}
_progress: dict[str, Any] = {}
_user_code_limit: float | None = None
_placed: ContextVar[Callable[[], None]] = ContextVar("placed", default=lambda: None)
F = TypeVar("F", bound=Callable[..., Any])


class Wait:
    """One row: `with waiting("what", deadline=seconds, then="what happens then"):` around anything that waits.

    A plain `with`, in asynchronous code too. Waits nest: the inner one is the more exact. An instance is entered once.
    """

    __slots__ = ("deadline", "loop", "queued", "reported", "since", "stop", "then", "thread", "waited", "what")

    def __init__(
        self, what: str, *, deadline: float | None, then: str, stop: bool = False, queued: bool = False
    ) -> None:
        """
        Args:
            what: What is waited for, with the numbers that tell it from its like.
            deadline: Seconds until the wait's own mechanism ends it; None where it may take as long as it takes, and
                `then` says why.
            then: What happens at the deadline: retried, the sample fails, the run stops.
            stop: The mechanism cannot be relied on (a call into C, say): the watchdog ends the process with a non-zero
                exit status when the wait is still there after deadline and grace.
            queued: It waits for a place first; `restart` says that it runs.
        """
        self.what = what
        self.deadline = deadline
        """Seconds after `since`; None: as long as it takes."""
        self.then = then
        self.stop = stop
        """The process ends with an error if the wait is still there well after its deadline."""
        self.since = 0.0
        """`time.monotonic()`."""
        self.thread = 0
        self.loop: AbstractEventLoop | None = None
        """The event loop it waits in; None: a thread stands still."""
        self.reported = False
        self.queued = queued
        """It has no place yet to run in."""
        self.waited = 0.0
        """Seconds that it waited for a place."""

    def __enter__(self) -> Wait:
        self.thread, self.loop, self.since = get_ident(), _get_running_loop(), time.monotonic()
        _table[id(self)] = self
        return self

    def __exit__(self, *error: object) -> None:
        _table.pop(id(self), None)

    def restart(self, deadline: float | None) -> None:
        """What was only queued for begins now, with its deadline."""
        now = time.monotonic()
        if self.queued:
            self.queued, self.waited = False, now - self.since
        self.since, self.deadline = now, deadline

    @property
    def age(self) -> float:
        """Seconds so far."""
        return time.monotonic() - self.since

    @property
    def overdue(self) -> float:
        """Seconds past the deadline; negative before it, and always without one."""
        return float("-inf") if self.deadline is None else self.age - self.deadline


waiting = Wait


def named(what: str, *, then: str, deadline: str | float = "", stop: bool = False) -> Callable[[F], F]:
    """Decorator of a plain method that as a whole is a wait of whoever calls it.

    Args:
        what: Its name; `{0}` is the first argument after `self`.
        then: As `waiting`.
        deadline: Seconds, or the attribute of `self.args` that holds them; none when empty.
        stop: As `waiting`.
    """

    def decorate(method: F) -> F:
        @functools.wraps(method)
        def call(self: Any, *args: Any, **keywords: Any) -> Any:
            limit = getattr(self.args, deadline or "none", None) if isinstance(deadline, str) else deadline
            with waiting(what.format(*args), deadline=limit, then=then, stop=stop):
                return method(self, *args, **keywords)

        return call  # type: ignore[return-value]

    return decorate


def when_placed(call: Callable[[], None]) -> None:
    """In the rest of this task's context, `placed` is to be told by calling it."""
    _placed.set(call)


def placed() -> Callable[[], None]:
    """To be called, in any thread, when what this task waits a place for has got it."""
    return _placed.get()


def limit_user_code(seconds: float | None) -> None:
    """Set what `user_code_limit` answers in this process: `--user-code-timeout`."""
    global _user_code_limit
    _user_code_limit = seconds


def user_code_limit() -> float | None:
    """Seconds that user code without a deadline of its own may take."""
    return _user_code_limit


def current() -> list[Wait]:
    """What this process waits for now, oldest first."""
    return sorted(_table.values(), key=lambda wait: wait.since)


def progress(**facts: Any) -> None:
    """Remember where the process is (`rollout_id=3`, `weight_version=4`); published with the waits."""
    _progress.update(facts)
    _progress["at"] = time.time()


def last_progress() -> dict[str, Any]:
    """Facts given to `progress`; `at` is when the last came, in seconds since the epoch."""
    return dict(_progress)


def forget_all() -> None:
    """Empty the table: for a forked child, which inherits rows that nobody will remove."""
    _table.clear()
    _progress.clear()
