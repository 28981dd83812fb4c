"""The engines of the simulation: the samples that share them, and the time at which the next sample is done.

The speed of a sample's tokens depends on the number of samples in its engine (`Speed`) and is the same for all of them.
So each engine has one clock that counts tokens per sample. A sample is done when the clock reaches the sample's mark,
and an event costs O(log n). Called by `simulate`.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

from slime_commands.plan.workload import Speed

DONE = 1e-9
"""Remaining tokens at or below which a sample is done."""


@dataclass(eq=False)
class Request:
    """A sample in an engine, or waiting for a place."""

    tokens: float
    """Tokens still to generate."""
    done: Callable[[], None]
    started: Callable[[], None]
    """Called when the request gets its place."""
    after: float = 0.0
    """Seconds for which the request keeps its place without using the engine."""
    mark: float = 0.0
    engine: int | None = None
    cancelled: bool = False


@dataclass
class _Engine:
    clock: float = 0.0
    heap: list[tuple[float, int, Request]] = field(default_factory=list)
    active: int = 0


class Engines:
    """All engines, with `places` for samples over all of them.

    Args:
        speed: Speed of each engine.
        count: Number of engines.
        places: Number of samples that may be in the engines at once; others wait in order.
        later: The simulation's `later(seconds, action)`.
    """

    def __init__(
        self, speed: Speed, count: int, places: int, later: Callable[[float, Callable[[], None]], None]
    ) -> None:
        self._speed, self._later = speed, later
        self._engines = [_Engine() for _ in range(count)]
        self._free = places
        self._waiting: list[Request] = []
        self._first = 0
        self._numbers = itertools.count()
        self.paused = False
        self.generated = 0.0
        """Number of tokens of all samples together."""

    @property
    def active(self) -> int:
        """Number of samples that are generating."""
        return sum(engine.active for engine in self._engines)

    @property
    def waiting(self) -> int:
        """Number of samples without a place."""
        return len(self._waiting) - self._first

    def add(self, request: Request) -> None:
        """Queue a sample."""
        self._waiting.append(request)
        self._fill()

    def next_in(self) -> float:
        """Return the seconds until the next sample has its last token; infinity if no sample is active."""
        if self.paused:
            return float("inf")
        best = float("inf")
        for engine in self._engines:
            self._clean(engine)
            if engine.heap:
                left = max(0.0, engine.heap[0][0] - engine.clock)
                best = min(best, left * self._speed.token_seconds(engine.active))
        return best

    def advance(self, seconds: float) -> None:
        """Advance the time and remove samples that are done."""
        for engine in self._engines:
            self._clean(engine)
            if engine.heap and not self.paused:
                pace, before = self._speed.token_seconds(engine.active), engine.clock
                reached = before + seconds / pace if pace else float("inf")
                engine.clock = min(reached, engine.heap[0][0])
                self.generated += (engine.clock - before) * engine.active
            while engine.heap and not self.paused:
                self._clean(engine)
                if not engine.heap or engine.heap[0][0] - engine.clock > DONE * max(1.0, engine.clock):
                    break
                _, _, request = heapq.heappop(engine.heap)
                engine.active -= 1
                request.engine, request.tokens = None, 0.0
                self._later(self._speed.latency + request.after, lambda request=request: self._leave(request))  # type: ignore[misc]

    def cancel(self, request: Request) -> None:
        """Abort a sample and set its `tokens` to the number of missing tokens."""
        request.cancelled = True
        if request.engine is not None:
            engine = self._engines[request.engine]
            request.tokens = max(0.0, request.mark - engine.clock)
            engine.active -= 1
            request.engine = None
            self._free += 1

    def fill(self) -> None:
        """Give free places to waiting samples."""
        self._fill()

    def _leave(self, request: Request) -> None:
        self._free += 1
        if not request.cancelled:
            request.done()
        self._fill()

    def _fill(self) -> None:
        while self._free and self._first < len(self._waiting):
            request = self._waiting[self._first]
            self._first += 1
            if request.cancelled:
                continue
            self._free -= 1
            number = min(range(len(self._engines)), key=lambda i: self._engines[i].active)
            engine = self._engines[number]
            request.engine, request.mark = number, engine.clock + request.tokens
            engine.active += 1
            heapq.heappush(engine.heap, (request.mark, next(self._numbers), request))
            request.started()
        if self._first > 1000:
            del self._waiting[: self._first]
            self._first = 0

    def _clean(self, engine: _Engine) -> None:
        while engine.heap and engine.heap[0][2].cancelled:
            heapq.heappop(engine.heap)
