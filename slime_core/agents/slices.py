"""Work of many requests -> slices of the event loop's time, with everybody else's callbacks in between.

`server` gives it what it computes for a request: reading it, writing the prompt, reading the answer. What a reader
would get wrong: asyncio runs all callbacks that are ready before it looks at timers and sockets again. 512 agents that
ask at the same moment are 512 such callbacks; one after the other, each is short, and together they are late for all.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from slime_core.waits import waiting

T = TypeVar("T")

SLICE_S = 0.005
"""Seconds of work in one turn of the loop; what begins in it is ended."""


class TimeSlices:
    """Runs work in the order in which it came, a slice in each turn of one event loop."""

    def __init__(self, seconds: float = SLICE_S) -> None:
        self._seconds = seconds
        self._spent = 0.0
        self._queue: deque[tuple[Callable[[], Any], asyncio.Future[Any]]] = deque()
        self._next: asyncio.Handle | None = None

    async def run(self, work: Callable[[], T]) -> T:
        """What `work()` returns or raises: at once while there is time in this turn, else in one of the next.

        Cancelled before its turn, it is not run; cancelled later, it may have been: so it should change nothing.
        """
        if not self._queue and self._spent < self._seconds:
            begun = time.perf_counter()
            try:
                return work()
            finally:
                self._spent += time.perf_counter() - begun
                self._go_on()
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._queue.append((work, done))
        self._go_on()
        with waiting("the loop's time for an agent's request", deadline=None, then="each turn of the loop takes some"):
            return await done

    def _go_on(self) -> None:
        if self._next is None:
            self._next = asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._next, self._spent, begun = None, 0.0, time.perf_counter()
        while self._queue:
            work, done = self._queue.popleft()
            if done.cancelled():
                continue
            try:
                done.set_result(work())
            except Exception as error:  # boundary: whoever waits for the work gets what it raised
                done.set_exception(error)
            if time.perf_counter() - begun >= self._seconds:
                break
        if self._queue:
            self._go_on()
