"""The requests of a client that are under way: what one try of each gives, who may be aborted, and what is cut when a
server is taken out. `client` chooses where a try goes, and decides what a failure means.

Runs in the event loop of the rollout stage; a `Cut` is reached from the supervisor's thread through the loop.
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
from slime_core.types import GenerationOutput
from slime_engine_sglang.api.answers import MASK, Pieces, event_of, output_of
from slime_engine_sglang.api.continuation import joined
from slime_engine_sglang.api.requests import check_prompt
from slime_engine_sglang.api.transport import Http, encoded, engine_error, expecting, lines
from slime_engine_sglang.api.worker import Worker, WorkerPool, WorkerState

T = TypeVar("T")


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
    tells_mask: bool = False
    """Its answer tells what each token was sampled among: all of the vocabulary where `body` did not have to ask."""
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
        if self.tells_mask and made.token_ids and MASK not in made.meta_info:
            if "return_sampling_mask" in self.body:
                raise EngineError("the server does not return what tokens were sampled among (SGLang 0.5.23 does)")
            made.meta_info[MASK] = [[]] * len(made.token_ids)
        if self.prompt and made.token_ids:
            check_prompt(self.prompt, made.meta_info)
        made.meta_info["id"] = self.rid
        return made


class Cut:
    """A try at one server, among the others there; `by` ends it from outside, and is never called by its own task."""

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
    """All of them."""

    def __init__(self, http: Http, pool: WorkerPool) -> None:
        self._loop = asyncio.get_running_loop()
        self._http = http
        self._pool = pool
        self.all: set[Flight] = set()
        """Those that have no answer yet: whom `abort` finds."""
        self._cuts: dict[Worker | None, set[Cut]] = {}
        self._change = asyncio.Event()
        self._closed = False
        pool.on_change(self._changed)

    def close(self) -> None:
        """No more news from the pool."""
        self._closed = True

    async def ask(self, flight: Flight, url: str, worker: Worker | None) -> GenerationOutput:
        """One try: the answer of `url`, which is `worker`'s, or the router's where that is None; all at once.

        Cut when the worker is quarantined. Raises EngineError.
        """
        data, headers = encoded(flight.sent, flight.headers)
        with self._at(worker) as cut:
            asked = self._http.once("POST", f"{url}/generate", data, headers)
            answer = await self._until(flight.deadline, asked, cut, flight, url, worker)
        return output_of(answer.json(), url)

    async def stream(self, flight: Flight, url: str, worker: Worker | None) -> AsyncGenerator[GenerationOutput]:
        """Like `ask`, yielding everything so far with each piece. Raises EngineError also when the last is missing."""
        with self._at(worker) as cut:
            pieces, finished = Pieces(url), False
            async with AsyncExitStack() as stack:
                events = self._http.events(url, "/generate", flight.sent, headers=flight.headers)
                opened = stack.enter_async_context(events)
                # A stream may last as long as something comes.
                response = await self._until(None, opened, cut, flight, url, worker)
                cut.by = response.close  # another task may be the reader from here on
                async for line in lines(response.content):
                    if not line.startswith(b"data:") or line[5:].strip() == b"[DONE]":
                        continue
                    output = pieces.add(event_of(line[5:], url))
                    finished = output.meta_info.get("finish_reason") is not None
                    yield output
        if not finished:
            raise engine_error(f"{url}/generate", "the stream ended before the answer was finished", 200)

    def _at(self, worker: Worker | None) -> Cut:
        """A try at this server; None: behind the router."""
        return Cut(self._cuts.setdefault(worker, set()))

    async def _until(
        self, deadline: float | None, step: Awaitable[T], cut: Cut, flight: Flight, url: str, worker: Worker | None
    ) -> T:
        """The step's result. Raises EngineError when the try is cut, or at the deadline by `time.monotonic()`."""
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
            raise engine_error(f"{url}/generate", problem, status) from None

    @property
    def aborted(self) -> list[Flight]:
        """Those that were aborted and have no answer yet."""
        return [flight for flight in self.all if flight.aborted]

    def abort(self, rid: str | None) -> str | None:
        """Mark one request, or all: those that no server has end at once, the others are not tried again.

        Returns:
            The name under which a server knows it.
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
        cuts = list(self._cuts.get(worker, ()))
        if not worker.owned:  # nobody kills it, so nothing ends its requests behind the router
            cuts += self._cuts.get(None, ())
        for cut in cuts:
            cut.by()

    def wake(self) -> None:
        """Have whoever waits for a change look again."""
        waiting, self._change = self._change, asyncio.Event()
        waiting.set()
