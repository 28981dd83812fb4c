"""Spread coroutines that become ready at the same moment over several turns of the event loop, in order of arrival.

::

    await loop_turn()        returns at once if this turn of the loop has time left; else in a later turn, in order
    ...                      the work up to the next wait is this coroutine's share

Code that works in the loop once per sample, request, or response of an engine or a tool awaits `loop_turn` first.
Asyncio runs all ready callbacks before it checks timers and sockets again. 512 samples that start or get a response at
the same moment are 512 such callbacks; each is short, but together they delay timers and sockets.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable
from functools import lru_cache

from slime_core.waits.table import waiting

_SHARE_S = 0.005
"""Seconds per turn of the loop for coroutines that await `loop_turn`; work that began in this time is completed."""


class Pace:
    """The queue of coroutines that wait for a turn of one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float = _SHARE_S) -> None:
        self._loop = loop
        self._seconds = seconds
        self._queue: deque[asyncio.Future[None]] = deque()
        self._began: float | None = None
        """Loop time at which the last resumed coroutines began (a simulated clock does not advance meanwhile)."""
        self._passed = 0
        """Number of coroutines resumed since then."""
        self._draining = False
        """True while coroutines are queued or about to resume; new ones join the end of the queue."""

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
        """Resume as many coroutines as fit into `seconds`, judged by the last ones; schedule the next call."""
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


_pace_of = lru_cache(maxsize=8)(Pace)
"""Event loop -> its queue."""


def loop_turn() -> Awaitable[None]:
    """Wait for this coroutine's share of the running loop's time; return at once if time is left."""
    return _pace_of(asyncio.get_running_loop()).turn()
