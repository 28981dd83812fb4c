"""Many coroutines that go on at the same moment -> a few in each turn of the event loop, in the order they came.

::

    await loop_turn()        at once, while the turn of the loop has time left; else in one of the next, in order
    ...                      what is computed up to the next wait is this coroutine's share

Whoever has work for the loop once per sample, request, answer of an engine or of a tool awaits it first. Asyncio runs
all callbacks that are ready before it looks at timers and sockets again. 512 samples that start, or whose answers come,
at the same moment are 512 such callbacks; each is short, together they are late for all.
"""

from __future__ import annotations

import asyncio
from collections import deque
from weakref import WeakKeyDictionary

from slime_core.waits.table import waiting

SHARE_S = 0.005
"""Seconds of one turn of the loop that go to those who ask here; what begins in them is ended."""


class Pace:
    """The queue of one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float = SHARE_S) -> None:
        self._loop = loop
        self._seconds = seconds
        self._queue: deque[asyncio.Future[None]] = deque()
        self._began: float | None = None
        """When those began that were let go on last, by the loop's clock (a simulation's stands still meanwhile)."""
        self._passed = 0
        """How many."""
        self._draining = False
        """Somebody waits, or was let go on and has yet to: whoever comes now is behind them."""

    async def turn(self) -> None:
        """Return in this turn of the loop or a later one."""
        if self._began is None:
            self._began, self._passed = self._loop.time(), 0
            self._loop.call_soon(self._next)
        if not self._draining and (not self._passed or self._loop.time() - self._began < self._seconds):
            self._passed += 1
            return
        self._draining = True
        go_on: asyncio.Future[None] = self._loop.create_future()
        self._queue.append(go_on)
        with waiting("the event loop's time", deadline=None, then="each turn of the loop takes some"):
            await go_on

    def _next(self) -> None:
        """Those who were let go on have: let as many as fit by what these took, and be called after them."""
        assert self._began is not None
        now = self._loop.time()
        took, passed = now - self._began, self._passed
        most = 2 * passed + 1 if took * 2 <= self._seconds else max(1, int(passed * self._seconds / took))
        self._began, self._passed = now, 0
        while self._queue and self._passed < most:
            go_on = self._queue.popleft()
            if not go_on.done():  # cancelled
                go_on.set_result(None)
                self._passed += 1
        if not self._passed:
            self._began, self._draining = None, False
            return
        self._loop.call_soon(self._next)


_PACES: WeakKeyDictionary[asyncio.AbstractEventLoop, Pace] = WeakKeyDictionary()


async def loop_turn() -> None:
    """Wait for this coroutine's share of the running loop's time; not at all while there is some."""
    loop = asyncio.get_running_loop()
    pace = _PACES.get(loop)
    if pace is None:
        pace = _PACES[loop] = Pace(loop)
    await pace.turn()
