"""The requests of a client in flight: results of tries, aborts, and the tries to cut when a server is taken out.

`client` chooses the server of a try and handles failures. The module runs in the event loop of the rollout stage; the
supervisor's thread reaches a `Cut` through the loop.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, TypeVar

from slime_core.errors import EngineError
from slime_core.sample import GenerationOutput
from slime_engine_http.api.answers import MASK, Wire, event_of
from slime_engine_http.api.continuation import joined
from slime_engine_http.api.requests import check_prompt
from slime_engine_http.api.transport import Http, encoded, engine_error, expecting, lines
from slime_engine_http.api.worker import Worker, WorkerPool, WorkerState

T = TypeVar("T")


def server_name(name: str) -> str:
    """Return the name to send to servers. No such name is a prefix of another, since SGLang aborts by prefix."""
    return f"{name.replace('%', '%25').replace('~', '%7E')}~"


@dataclass(eq=False)
class Flight:
    """A request from the caller's call to its answer, with all tries at several servers."""

    body: dict[str, Any]
    session_id: str | None
    deadline: float = math.inf
    """`time.monotonic()` value after which the request fails; set when the request gets a place in flight."""
    wanted: int | None = None
    """Wanted weight version at the start of the current try."""
    rid: str = ""
    """Request id for the caller; `body["rid"]` is the id of the current try."""
    tries: int = 0
    """Number of tries at servers."""
    direct: bool = False
    """True after a router failed the request: later tries go directly to servers."""
    aborted: bool = False
    avoid: set[Worker] = field(default_factory=set)
    """Servers that failed the request."""
    begun: GenerationOutput | None = None
    """Output before a weight update interrupted the request; `body` then requests the rest."""
    prefixes: str = ""
    """Name of the part of the servers' prefix caches that the current try may use; empty: the whole cache."""
    tells_mask: bool = False
    """True if the output must have each token's sampling mask. Without `return_sampling_mask` in `body`, nothing cuts
    the vocabulary, and the masks are empty lists."""
    prompt: int = 0
    """Token count of a prompt with images, compared with the server's own count; 0: the counts are not compared."""
    calm: int | None = None
    """`pool.interruptions` at the start of this try; None if an update was already in progress."""

    @property
    def left(self) -> float:
        """Return the seconds until the deadline."""
        return self.deadline - time.monotonic()

    @property
    def streams(self) -> bool:
        """Return True if the answer comes in pieces."""
        return "stream" in self.body

    @property
    def sent(self) -> dict[str, Any]:
        """Return the request body of the current try."""
        return {**self.body, "extra_key": self.prefixes} if self.prefixes else self.body

    @property
    def headers(self) -> dict[str, str]:
        """Return the HTTP headers of every try."""
        return {} if self.session_id is None else {"X-SMG-Routing-Key": self.session_id}

    def whole(self, output: GenerationOutput) -> GenerationOutput:
        """Join earlier output and the output of this try, and set the caller's request id.

        Raises:
            EngineError: The server counted a different number of tokens in a prompt with images.
        """
        made = output
        if self.begun is not None:
            with expecting("numbers as counters, base64 as routed_experts", "/generate", output.meta_info):
                made = joined(self.begun, output)
        if self.tells_mask and made.token_ids and MASK not in made.meta_info:
            if "return_sampling_mask" in self.body:
                raise EngineError("the server does not return what tokens were sampled among (SGLang 0.5.23 does)")
            made.meta_info[MASK] = [[]] * len(made.token_ids)
        if self.prompt and made.token_ids:
            check_prompt(self.prompt, made.meta_info)
        made.meta_info["id"] = self.rid
        return made


class Cut:
    """A try in the set of tries at one server; other tasks end it by calling `by`, its own task never calls it."""

    __slots__ = ("_others", "by")

    def __init__(self, others: set[Cut]) -> None:
        self._others = others
        self.by: Callable[[], None] = lambda: None

    def __enter__(self) -> Cut:
        self._others.add(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._others.discard(self)


class Flights:
    """All requests in flight."""

    def __init__(self, http: Http, pool: WorkerPool, wire: Wire) -> None:
        self._loop = asyncio.get_running_loop()
        self._http, self._wire = http, wire
        self._pool = pool
        self.all: set[Flight] = set()
        """Requests without an answer yet, which `abort` can find."""
        self._cuts: dict[Worker | None, set[Cut]] = {}
        self._change = asyncio.Event()
        self._closed = False
        pool.on_change(self._changed)

    def close(self) -> None:
        """Ignore further changes of the pool."""
        self._closed = True

    async def ask(self, flight: Flight, url: str, worker: Worker | None) -> GenerationOutput:
        """Make one try and return the whole output from `url`, the address of `worker`, or of the router if it is None.

        The try is cut when the worker is quarantined. Raises EngineError.
        """
        wire = self._wire
        data, headers = encoded(wire.request(flight.sent), flight.headers)
        with self._at(worker) as cut:
            asked = self._http.once("POST", url + wire.path, data, headers)
            answer = await self._until(flight.deadline, asked, cut, flight, url, worker)
        return wire.reader(url, flight.body).add(answer.json())

    async def stream(self, flight: Flight, url: str, worker: Worker | None) -> AsyncGenerator[GenerationOutput]:
        """Like `ask`, but yield the output so far with each piece. Raises EngineError also if the last is missing."""
        wire = self._wire
        with self._at(worker) as cut:
            pieces, finished = wire.reader(url, flight.body), False
            async with AsyncExitStack() as stack:
                events = self._http.events(url, wire.path, wire.request(flight.sent), headers=flight.headers)
                opened = stack.enter_async_context(events)
                # A stream has no time limit while pieces arrive.
                response = await self._until(None, opened, cut, flight, url, worker)
                cut.by = response.close  # another task may be the reader from here on
                async for line in lines(response.content):
                    if not line.startswith(b"data:") or line[5:].strip() == b"[DONE]":
                        continue
                    output = pieces.add(event_of(line[5:], url))
                    finished = output.meta_info.get("finish_reason") is not None
                    yield output
        if not finished:
            raise engine_error(url + wire.path, "the stream ended before the answer was finished", 200)

    def _at(self, worker: Worker | None) -> Cut:
        """Register a try at this server; None: a try through the router."""
        return Cut(self._cuts.setdefault(worker, set()))

    async def _until(
        self, deadline: float | None, step: Awaitable[T], cut: Cut, flight: Flight, url: str, worker: Worker | None
    ) -> T:
        """Return the step's result. Raises EngineError if the try is cut, or at the `time.monotonic()` deadline."""
        try:
            async with asyncio.timeout_at(deadline) as limit:
                cut.by = lambda: None if limit.expired() else limit.reschedule(self._loop.time())
                return await step
        except TimeoutError:
            status = None
            if flight.left <= 0:
                problem = f"no answer within {self._http.timeout:g} s (--rollout-timeout)"
            elif worker is not None:
                problem = f"the server was taken out: {worker.reason}"
            else:
                problem, status = "a server behind the router was taken out, perhaps this request's", 503
            raise engine_error(url + self._wire.path, problem, status) from None

    @property
    def aborted(self) -> list[Flight]:
        """Return the aborted requests without an answer yet."""
        return [flight for flight in self.all if flight.aborted]

    def abort(self, rid: str | None) -> str | None:
        """Mark one request, or all, as aborted: requests at no server end at once, the others are not tried again.

        Returns:
            The name of the request at the servers.
        """
        name = None if rid is None else server_name(rid)
        for flight in self.all:
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
        """Handle a change of a worker, in the thread that made the change."""
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
        cuts = list(self._cuts.get(worker, ()))
        if not worker.owned:  # slime does not kill it, so its requests behind the router would not end
            cuts += self._cuts.get(None, ())
        for cut in cuts:
            cut.by()

    def wake(self) -> None:
        """Wake all tasks that wait for a change."""
        waiting, self._change = self._change, asyncio.Event()
        waiting.set()
