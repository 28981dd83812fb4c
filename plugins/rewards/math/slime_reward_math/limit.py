"""A bound on the processor time of a call that holds in every thread of a process, and leaves nothing running.

A second thread watches the caller's processor clock and raises an exception in the caller when its time is used up.
The caller is pure Python (sympy, antlr): what the interpreter does in C without a pause is kept short by `size`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from slime_core.waits import raise_in, take_late

T = TypeVar("T")

_AGAIN_S = 0.2
"""Processor seconds after which the exception is raised once more, where a library has caught it."""


class _OverTime(BaseException):
    """Raised in the thread that runs the call; no `except Exception` of a library catches it."""


def within(seconds: float, call: Callable[[], T]) -> T | None:
    """Return what `call` returns; None once it has used that many seconds of this thread's processor time."""
    thread, over, raised = threading.get_ident(), threading.Event(), threading.Event()
    clock = time.pthread_getcpuclockid(thread) if hasattr(time, "pthread_getcpuclockid") else time.CLOCK_MONOTONIC
    end = time.clock_gettime(clock) + seconds

    def watch() -> None:
        raised_at = end
        while not over.wait(max(raised_at - time.clock_gettime(clock), 0.01)):
            if time.clock_gettime(clock) >= raised_at:
                raised.set()
                raise_in(thread, _OverTime)
                raised_at = time.clock_gettime(clock) + _AGAIN_S

    watcher = threading.Thread(target=watch, name="slime-math-limit", daemon=True)
    watcher.start()
    result: T | None = None
    called = ended = False
    while not ended:  # twice when the exception comes while the call ends
        try:
            if not called:
                called = True
                try:
                    result = call()
                finally:
                    over.set()
            over.set()
            watcher.join()
            if raised.is_set():
                take_late(_OverTime)
            ended = True
        except _OverTime:
            continue
    return result
