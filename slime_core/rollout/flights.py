"""`Flights`: the groups that are being generated, and which of them have ended, in the order in which they were drawn.

`rollout.pool` starts groups here, waits at the bell, and decides on what has become of them (`Finished`). A group's end
costs the same however many others are in flight. The order in which groups end says nothing; those that ended since the
last look come in the order of their drawing, so that a slow reward changes no result.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from slime_core.rollout.gate import Hold
from slime_core.rollout.staleness import retries, version_span
from slime_core.types import Group


class Bell:
    """Wakes the one who waits for it, in the event loop's next turn: what happens in one turn is seen together."""

    def __init__(self) -> None:
        self._rung = self._at_once = False
        self._waiter: asyncio.Future[bool] | None = None

    def ring(self, *_: Any) -> None:
        """Something has ended, or has changed."""
        self._rung = True
        if self._waiter is not None and self._at_once:
            _answer(self._waiter, True)
        elif self._waiter is not None:
            asyncio.get_running_loop().call_soon(_answer, self._waiter, True)

    def clear(self) -> None:
        """Whoever will wait has seen everything so far."""
        self._rung = False

    async def wait(self, seconds: float | None, *, at_once: bool = False) -> bool:
        """Whether it has rung since `clear`, or does so in that time; `at_once` leaves out the turn."""
        if at_once and self._rung:
            return True
        loop, self._at_once = asyncio.get_running_loop(), at_once
        self._waiter = waiter = loop.create_future()
        if self._rung:
            loop.call_soon(_answer, waiter, True)
        timer = None if seconds is None else loop.call_later(seconds, _answer, waiter, False)
        try:
            found: bool = await waiter
            return found
        finally:
            self._waiter = None
            if timer is not None:
                timer.cancel()


def _answer(waiter: asyncio.Future[bool], rung: bool) -> None:
    if not waiter.done():
        waiter.set_result(rung)


@dataclass
class Finished:
    """A group that was generated and decided on."""

    samples: Group
    original: Group
    """As it was drawn: other samples, where a generate function fanned out."""
    began: int = 0
    """Weight version served when its generation began."""
    reason: str | None = None
    """Why the filter dropped it."""

    @cached_property
    def span(self) -> tuple[int, int] | None:
        """Oldest and newest version of its tokens."""
        return version_span(self.samples, self.began)

    @property
    def retries(self) -> int:
        """How often it has been regenerated for its age."""
        return retries(self.original)

    @property
    def index(self) -> int:
        """The `group_index`."""
        return self.samples[0].group_index or 0

    @property
    def turn(self) -> tuple[int, int]:
        """What orders groups for training: oldest version first, then as they were drawn."""
        return (self.span[0] if self.span else self.began, self.index)


@dataclass(eq=False)
class Flight:
    """A group that is being generated."""

    original: Group
    """As it was drawn."""
    began: int
    """Weight version served then."""
    number: int
    """In the order of drawing."""
    unfinished: int
    """Samples that have not ended."""
    hold: Hold
    """Has the engine wait while the group is about to run, and until it is decided on."""
    task: asyncio.Task[Group]

    @property
    def places(self) -> int:
        """That it takes: at least 1, or groups whose samples wait for a common reward (--group-rm) would pile up."""
        return max(self.unfinished, 1)

    def finished(self) -> Finished:
        """What has become of the group, whose work has ended. Raises what that raised."""
        return Finished(self.task.result(), self.original, self.began)

    def result(self) -> Finished | None:
        """The same; None where it was cut off between a response and its reward, or goes on."""
        task = self.task
        return None if not task.done() or task.cancelled() or task.exception() is not None else self.finished()


class Flights:
    """Groups in flight; `bell` rings when one has ended."""

    def __init__(self, bell: Bell) -> None:
        self._bell = bell
        self._numbers = itertools.count()
        self._open: dict[asyncio.Task[Group], Flight] = {}
        self._ended: list[Flight] = []
        """In the order of ending."""
        self.places = 0
        """Of all of them."""

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Flight]:
        """In the order of drawing."""
        return iter(self._open.values())

    def start(
        self,
        group: Group,
        began: int,
        unfinished: int,
        hold: Hold,
        work: Callable[[Flight], Coroutine[Any, Any, Group]],
    ) -> None:
        """Begin `work`, which generates the group and may `resize` its flight; whoever takes that closes its `hold`."""

        async def run() -> Group:
            try:
                return await work(flight)
            finally:
                hold.complete()
                self._ended.append(flight)
                self._bell.ring()

        flight = Flight(group, began, next(self._numbers), unfinished, hold, asyncio.create_task(run()))
        self._open[flight.task] = flight
        self.places += flight.places

    def resize(self, flight: Flight, unfinished: int) -> None:
        """So many samples of the group have not ended."""
        before, flight.unfinished = flight.places, unfinished
        if flight.task in self._open:
            self.places += flight.places - before

    def take_ended(self) -> Iterator[Flight]:
        """Those that have ended since the last call, in the order of drawing; each is in flight until it comes."""
        ended, self._ended = sorted(self._ended, key=lambda f: f.number), []
        for flight in ended:
            del self._open[flight.task]
            self.places -= flight.places
            yield flight

    def take_all(self) -> list[Flight]:
        """All that there are, in the order of drawing; they are in flight no more."""
        flights = list(self._open.values())
        self._open.clear()
        self._ended.clear()
        self.places = 0
        return flights
