"""The requests of a client that are under way: who may be aborted, and what is cut when a server is taken out.

Runs in the event loop of the rollout stage; a `Cut` is reached from the supervisor's thread through the loop.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from slime_core.types import GenerationOutput
from slime_engine_sglang.api.continuation import joined
from slime_engine_sglang.api.requests import check_prompt
from slime_engine_sglang.api.transport import expecting
from slime_engine_sglang.api.worker import Worker, WorkerPool, WorkerState


def server_name(name: str) -> str:
    """A request's name as servers are told it, so that none begins another: SGLang aborts all that begin with one."""
    return f"{name.replace('%', '%25').replace('~', '%7E')}~"


@dataclass(eq=False)
class Flight:
    """One request, from the caller's call to its answer, over all the servers that it is tried at."""

    body: dict[str, Any]
    session_id: str | None
    deadline: float = math.inf
    """`time.monotonic()` after which it is over; set when it has its place among those in flight."""
    wanted: int | None = None
    """Weight version wanted when the present try began."""
    rid: str = ""
    """As the caller knows it; `body["rid"]` is the present try's."""
    tries: int = 0
    """Times that a server had it."""
    direct: bool = False
    """A router failed it: it goes to servers from now on."""
    aborted: bool = False
    avoid: set[Worker] = field(default_factory=set)
    """Servers that failed it."""
    begun: GenerationOutput | None = None
    """What came before a weight update cut it short; `body` asks for the rest."""
    prefixes: str = ""
    """Name of the part of the servers' prefix caches that the present try may look into; empty: all of it."""
    prompt: int = 0
    """Tokens of a prompt with images, of which the server makes the images' anew; 0: they are not compared."""
    calm: int | None = None
    """`pool.interruptions` when this try began; None: an update was under way already."""

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.monotonic()

    @property
    def streams(self) -> bool:
        """It is answered in pieces."""
        return "stream" in self.body

    @property
    def sent(self) -> dict[str, Any]:
        """What the present try sends."""
        return {**self.body, "extra_key": self.prefixes} if self.prefixes else self.body

    @property
    def headers(self) -> dict[str, str]:
        """Of every try."""
        return {} if self.session_id is None else {"X-SMG-Routing-Key": self.session_id}

    def whole(self, output: GenerationOutput) -> GenerationOutput:
        """The answer to this try behind what came before it, with the caller's name and not the try's.

        Raises:
            EngineError: The server read a prompt with images otherwise.
        """
        made = output
        if self.begun is not None:
            with expecting("numbers as counters, base64 as routed_experts", "/generate", output.meta_info):
                made = joined(self.begun, output)
        if self.prompt and made.token_ids:
            check_prompt(self.prompt, made.meta_info)
        made.meta_info["id"] = self.rid
        return made


class Cut:
    """How a try at one server is ended from outside; `by` is never called by the task that has it."""

    __slots__ = ("by",)

    def __init__(self) -> None:
        self.by: Callable[[], None] = lambda: None


class Flights:
    """All of them."""

    def __init__(self, pool: WorkerPool) -> None:
        self._loop = asyncio.get_running_loop()
        self._pool = pool
        self._all: set[Flight] = set()
        self._at: dict[Worker | None, set[Cut]] = {}
        self._change = asyncio.Event()
        self._closed = False
        pool.on_change(self._changed)

    def close(self) -> None:
        """No more news from the pool."""
        self._closed = True

    def begin(self, flight: Flight) -> None:
        """From now on `abort` finds it."""
        self._all.add(flight)

    def end(self, flight: Flight) -> None:
        """It has its answer, or gets none."""
        self._all.discard(flight)

    @contextmanager
    def at(self, worker: Worker | None) -> Iterator[Cut]:
        """A try is at this server, and is cut when that is quarantined; None: it is behind the router."""
        cut = Cut()
        self._at.setdefault(worker, set()).add(cut)
        try:
            yield cut
        finally:
            self._at[worker].discard(cut)

    @property
    def aborted(self) -> list[Flight]:
        """Those that were aborted and have no answer yet."""
        return [flight for flight in self._all if flight.aborted]

    def abort(self, rid: str | None) -> str | None:
        """Mark one request, or all: those that no server has end at once, the others are not tried again.

        Returns:
            The name under which a server knows it.
        """
        name = None if rid is None else server_name(rid)
        for flight in self._all:
            if rid is None or flight.rid == rid:
                flight.aborted = True
                name = None if rid is None else str(flight.body["rid"])
        self.wake()
        return name

    async def change(self, seconds: float) -> None:
        """Return when a server changed its state or something was aborted, or after `seconds`."""
        try:
            async with asyncio.timeout(max(seconds, 0.0)):
                await self._change.wait()
        except TimeoutError:
            return

    def _changed(self, worker: Worker) -> None:
        """In whatever thread changed it."""
        if self._closed or self._loop.is_closed():
            return
        try:
            self._loop.call_soon_threadsafe(self._take_note, worker)
        except RuntimeError:  # it was closed in between
            if not self._loop.is_closed():
                raise

    def _take_note(self, worker: Worker) -> None:
        self.wake()
        if worker.state is not WorkerState.QUARANTINED:
            return
        cuts = list(self._at.get(worker, ()))
        if not worker.owned:  # nobody kills it, so nothing ends its requests behind the router
            cuts += self._at.get(None, ())
        for cut in cuts:
            cut.by()

    def wake(self) -> None:
        """Have whoever waits for a change look again."""
        waiting, self._change = self._change, asyncio.Event()
        waiting.set()
