"""One try of a request at one URL: its answer, or one `EngineError`; cut when its server is taken out.

`client` chooses where, and decides what a failure means.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any, TypeVar

import orjson

from slime_core.errors import EngineError
from slime_core.types import GenerationOutput
from slime_engine_sglang.api.answers import Pieces, output_of
from slime_engine_sglang.api.flights import Cut, Flight, Flights
from slime_engine_sglang.api.transport import Http, encoded, engine_error, lines
from slime_engine_sglang.api.worker import Worker

T = TypeVar("T")


async def pieces_of(
    http: Http, flights: Flights, flight: Flight, url: str, worker: Worker | None
) -> AsyncGenerator[GenerationOutput]:
    """The answer of `url`, which is `worker`'s, or the router's where that is None.

    All at once, or for a stream everything so far with each piece.

    Raises:
        EngineError: Also when the last piece is missing.
    """
    if not flight.streams:
        yield await _whole(http, flights, flight, url, worker)
        return
    pieces, finished = Pieces(url), False
    with flights.at(worker) as cut:
        async with AsyncExitStack() as stack:
            events = http.events(url, "/generate", flight.sent, headers=flight.headers)
            opening = stack.enter_async_context(events)
            # A stream may last as long as something comes.
            response = await _until(cut, None, opening, lambda: _cut_off(http, flight, url, worker))
            cut.by = response.close  # another task may be the reader from here on
            async for line in lines(response.content):
                if not line.startswith(b"data:") or line[5:].strip() == b"[DONE]":
                    continue
                output = pieces.add(_chunk(line[5:], url))
                finished = output.meta_info.get("finish_reason") is not None
                yield output
    if not finished:
        raise engine_error(f"{url}/generate", "the stream ended before the answer was finished", 200)


async def _whole(http: Http, flights: Flights, flight: Flight, url: str, worker: Worker | None) -> GenerationOutput:
    data, headers = encoded(flight.sent, flight.headers)
    with flights.at(worker) as cut:
        asked = http.once("POST", f"{url}/generate", data, headers)
        answer = await _until(cut, flight.deadline, asked, lambda: _cut_off(http, flight, url, worker))
    return output_of(answer.json(), url)


async def _until(cut: Cut, deadline: float | None, step: Awaitable[T], error: Callable[[], EngineError]) -> T:
    """The step's result. Raises `error()` when it is cut, or at the deadline by `time.monotonic()`."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout_at(deadline) as limit:
            cut.by = lambda: None if limit.expired() else limit.reschedule(loop.time())
            return await step
    except TimeoutError:
        raise error() from None


def _cut_off(http: Http, flight: Flight, url: str, worker: Worker | None) -> EngineError:
    if flight.left <= 0:
        return engine_error(f"{url}/generate", f"no answer within {http.timeout:g} s (--rollout-timeout)")
    if worker is not None:
        return engine_error(f"{url}/generate", f"the server was taken out: {worker.reason}")
    return engine_error(f"{url}/generate", "a server behind the router was taken out, perhaps this request's", 503)


def _chunk(raw: bytes, url: str) -> dict[str, Any]:
    """One event of a stream. Raises EngineError for one that tells of an error, or of nothing."""
    try:
        chunk = orjson.loads(raw)
    except ValueError:
        chunk = None
    if not isinstance(chunk, dict):
        shown = raw[:200].decode(errors="replace")
        raise engine_error(f"{url}/generate", f"not an answer of SGLang's API: {shown!r}", 200)
    if "error" in chunk:
        error = chunk["error"] if isinstance(chunk["error"], Mapping) else {"message": chunk["error"]}
        status = error["code"] if isinstance(error.get("code"), int) else 400
        raise engine_error(f"{url}/generate", str(error.get("message", error)), status)
    return chunk
