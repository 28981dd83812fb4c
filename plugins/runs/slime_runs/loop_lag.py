"""Measure how late an event loop runs, with a timer that fires every 20 ms.

`rollout.stage` finds it by the entry-point group `slime.metrics`::

    due      |-- 20 ms --|            |-- 20 ms --|
    went off             |..lag..|                |lag|       perf/event_loop_lag_max, _p99: of all lags
                          callbacks that ran meanwhile

Every other callback in the loop (responses, deadlines, turns of other samples) is as late as the timer. The lag is wall
time, so it includes a busy machine and an engine that computes in this loop (`embedded`).
`perf/event_loop_lag_cpu_max` is the part in which the loop's own thread computed; it does not include callbacks that
slept.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

INTERVAL = 0.02
"""Seconds between two timer calls; a longer callback is always detected, and underestimated by at most this time."""
_SHARE = 0.99
_KEPT = 1 << 20
"""Maximum number of lags kept until `take` is called: five hours."""


class LoopLag:
    """The lag of one event loop; call `counting` in the loop and `take` from any thread."""

    def __init__(self, *, counts: bool = True) -> None:
        """Create the meter; `counts=False` measures nothing, for loops with simulated time."""
        self._counts = counts
        self._lock = threading.Lock()
        self._lags: list[float] = []
        self._cpu_max = 0.0
        self._users = 0
        self._timer: asyncio.TimerHandle | None = None
        self._due = self._cpu = 0.0

    def follow(self, runner: object) -> None:
        """Start measuring if the runner's loop always runs (a `LoopThread`'s); call it in the loop."""
        if not isinstance(runner, asyncio.Runner):
            self.begin()

    def begin(self) -> None:
        """Start measuring; call it in the loop. Each `begin` needs an `end`."""
        self._users += 1
        if self._users == 1 and self._counts:
            self._set(asyncio.get_running_loop())

    def end(self) -> None:
        """Stop measuring after the last `end`; the current lag is recorded."""
        self._users -= 1
        if not self._users and self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._note(asyncio.get_running_loop().time())

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Measure during a part of a coroutine: `begin` and `end` as a context manager."""
        self.begin()
        try:
            yield
        finally:
            self.end()

    def take(self) -> dict[str, float]:
        """Return `perf/event_loop_lag_{max,p99,cpu_max}` in seconds since the last call; empty without measurements."""
        with self._lock:
            lags, self._lags = self._lags, []
            cpu_max, self._cpu_max = self._cpu_max, 0.0
        if not lags:
            return {}
        lags.sort()
        return {
            "perf/event_loop_lag_max": lags[-1],
            "perf/event_loop_lag_p99": lags[min(int(_SHARE * len(lags)), len(lags) - 1)],
            "perf/event_loop_lag_cpu_max": cpu_max,
        }

    def _set(self, loop: asyncio.AbstractEventLoop) -> None:
        self._due = loop.time() + INTERVAL
        self._cpu = time.thread_time()
        self._timer = loop.call_at(self._due, self._beat, loop)

    def _beat(self, loop: asyncio.AbstractEventLoop) -> None:
        self._note(loop.time())
        self._set(loop)

    def _note(self, now: float) -> None:
        lag = max(0.0, now - self._due)
        computed = time.thread_time() - self._cpu
        with self._lock:
            if len(self._lags) < _KEPT:
                self._lags.append(lag)
            self._cpu_max = max(self._cpu_max, min(lag, computed))
