"""The table of waits of this process: `with waiting(...)` adds a row, and its end removes the row.

Code that waits, in any thread or task, writes to the table; the watchdog and the boards of plugins read it. A row
costs about a microsecond, so that thousands of requests may each have a row. A row does not end the wait at its
deadline: it records when the wait's own mechanism should end it.
"""

from __future__ import annotations

import functools
import os
import time
from asyncio import AbstractEventLoop
from asyncio.events import _get_running_loop
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from threading import get_ident
from typing import Any, TypeVar

from slime_core.errors import rollout_name

_table: dict[int, Wait] = {}
_progress: dict[str, object] = {}
_user_code_limit: float | None = None
_report: Callable[[str, str], Path | None] | None = None
_placed: ContextVar[Callable[[], None]] = ContextVar("placed", default=lambda: None)
F = TypeVar("F", bound=Callable[..., Any])


class Wait:
    """A row of the table: `with waiting("what", deadline=seconds, then="what happens then"):` around code that waits.

    Use a plain `with`, also in asynchronous code. Waits nest, and the inner wait is the more exact. An instance is
    in the table once at a time.
    """

    __slots__ = ("deadline", "loop", "queued", "reported", "since", "stop", "then", "thread", "waited", "what")

    def __init__(
        self, what: str, *, deadline: float | None, then: str, stop: bool = False, queued: bool = False
    ) -> None:
        """
        Args:
            what: Name of the awaited event, with numbers that identify it.
            deadline: Seconds until the wait's own mechanism ends it; None if the wait may take any time, and `then`
                gives the reason.
            then: Consequence of a missed deadline: a retry, the sample fails, the run stops.
            stop: The mechanism is unreliable (for example a call into C): the watchdog ends the process with a non-zero
                exit status if the wait still exists after deadline and grace.
            queued: The work waits for a place first; call `restart` when it begins to run.
        """
        self.what = what
        self.deadline = deadline
        """Seconds after `since`; None: no limit."""
        self.then = then
        self.stop = stop
        """True if the process ends with an error when the wait still exists well after its deadline."""
        self.since = 0.0
        """Start of the wait, as `time.monotonic()`."""
        self.thread = 0
        self.loop: AbstractEventLoop | None = None
        """Event loop in which the wait runs; None: the wait blocks a thread."""
        self.reported = False
        self.queued = queued
        """True while the work waits for a place to run."""
        self.waited = 0.0
        """Seconds that the work waited for a place."""

    def __enter__(self) -> Wait:
        self.thread, self.loop, self.since = get_ident(), _get_running_loop(), time.monotonic()
        _table[id(self)] = self
        return self

    def __exit__(self, *error: object) -> None:
        _table.pop(id(self), None)

    def restart(self, deadline: float | None) -> None:
        """Start the clock again, with a new deadline: the queued work begins to run."""
        now = time.monotonic()
        if self.queued:
            self.queued, self.waited = False, now - self.since
        self.since, self.deadline = now, deadline

    @property
    def age(self) -> float:
        """Seconds since the wait began."""
        return time.monotonic() - self.since

    @property
    def overdue(self) -> float:
        """Seconds past the deadline; negative before the deadline, and -inf without one."""
        return float("-inf") if self.deadline is None else self.age - self.deadline


waiting = Wait


def named(what: str, *, then: str, deadline: str | float | None = None, stop: bool = False) -> Callable[[F], F]:
    """Decorate a plain method, so that each call is recorded as a wait.

    Args:
        what: Name of the wait; `{0}` is the name of the rollout whose id is the first argument after `self`.
        then: As in `waiting`.
        deadline: Seconds, or the attribute of `self.args` that holds them; None means no deadline.
        stop: As in `waiting`.
    """

    def decorate(method: F) -> F:
        @functools.wraps(method)
        def call(self: Any, *args: Any, **keywords: object) -> object:
            limit = getattr(self.args, deadline) if isinstance(deadline, str) else deadline
            with waiting(what.format(*map(rollout_name, args[:1])), deadline=limit, then=then, stop=stop):
                return method(self, *args, **keywords)

        return call  # type: ignore[return-value]

    return decorate


def when_placed(call: Callable[[], None]) -> None:
    """Set the callback that `placed` returns in the rest of this task's context."""
    _placed.set(call)


def placed() -> Callable[[], None]:
    """Return the callback to call, in any thread, when the work that this task waits for has its place."""
    return _placed.get()


def limit_user_code(seconds: float | None) -> None:
    """Set the value of `user_code_limit` in this process, from `--user-code-timeout`."""
    global _user_code_limit
    _user_code_limit = seconds


def user_code_limit() -> float | None:
    """Return the seconds that user code without its own deadline may take; None means no limit."""
    return _user_code_limit


def report_by(report: Callable[[str, str], Path | None] | None) -> None:
    """Set the function `(what, detail) -> path` that writes a stall report; None: messages name no report."""
    global _report
    _report = report


def gave_up(what: str, seconds: float | None, detail: str = "") -> str:
    """Return the text of an error about a wait that passed its deadline; write the report that the text names."""
    passed = "" if seconds is None else f" within {seconds:g} s"
    path = None if _report is None else _report(what, detail)
    return f"{what}: not done{passed}{f' ({detail})' if detail else ''}{f'; waits and stacks: {path}' if path else ''}"


def current() -> list[Wait]:
    """Return the current waits of this process, oldest first."""
    return sorted(_table.values(), key=lambda wait: wait.since)


def progress(**facts: object) -> None:
    """Record the progress of the process (`rollout_id=3`, `weight_version=4`), published with the waits."""
    _progress.update(facts)
    _progress["at"] = time.time()


def last_progress() -> dict[str, object]:
    """Return the facts given to `progress`; `at` is the time of the last call, in seconds since the epoch."""
    return dict(_progress)


def forget_all() -> None:
    """Empty the table in a forked child, which inherits rows that will never be removed, and is not the run."""
    _table.clear()
    _progress.clear()
    report_by(None)


os.register_at_fork(after_in_child=forget_all)
