"""Streamed answers: server-sent events, several engine calls per request, clients that disconnect.

All calls of a request end if the client disconnects or a call fails. An invalid request raises before the status of its
stream is sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing, suppress
from typing import Any, TypeVar

import orjson
from fastapi import Request, Response
from fastapi.responses import StreamingResponse

from slime_serving.http.bodies import MOST_AT_ONCE
from slime_serving.http.errors import ClientGone

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return `value` as a JSON response; numbers that JSON cannot hold become null."""
    return Response(orjson.dumps(value), status_code=status, headers=headers, media_type="application/json")


def event(value: Any, name: str | None = None) -> bytes:
    """Encode a server-sent event; Anthropic's and OpenAI's Responses APIs send events with a name."""
    head = b"event: " + name.encode() + b"\n" if name else b""
    return head + b"data: " + orjson.dumps(value) + b"\n\n"


async def event_stream(
    request: Request, events: AsyncIterator[bytes], headers: dict[str, str] | None = None
) -> StreamingResponse:
    """Return a response that streams events. Raises ClientGone, and any exception of the first event."""
    first = await unless_disconnected(request, anext(events, b""))

    async def body() -> AsyncIterator[bytes]:
        yield first
        async for item in events:
            yield item
            await asyncio.sleep(0)  # events that are ready would follow without a turn for other clients

    return StreamingResponse(body(), headers=headers, media_type="text/event-stream")


async def unless_disconnected(request: Request, work: Awaitable[T]) -> T:
    """Await `work`; cancel it when the client disconnects. Raises ClientGone."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        raise ClientGone
    finally:
        task.cancel()
        watch.cancel()
        with suppress(asyncio.CancelledError):
            await watch


async def gather(calls: Sequence[Callable[[], Coroutine[Any, Any, T]]]) -> list[T]:
    """Return the results of all calls, in order; run `MOST_AT_ONCE` at a time. Raises the first failed call's error."""
    places = asyncio.Semaphore(MOST_AT_ONCE)

    async def placed(call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        async with places:
            return await call()

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(placed(call)) for call in calls]
    except BaseExceptionGroup as error:
        raise error.exceptions[0] from None
    return [task.result() for task in tasks]


async def merge(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Yield (stream number, item) until all streams have ended, `MOST_AT_ONCE` at a time. Raises a stream's error."""
    if len(streams) == 1:
        async with aclosing(streams[0]):
            async for only in streams[0]:
                yield 0, only
        return
    places = asyncio.Semaphore(MOST_AT_ONCE)
    queue: asyncio.Queue[tuple[int, T | None, BaseException | None]] = asyncio.Queue()

    async def pump(index: int, stream: AsyncIterator[T]) -> None:
        try:
            async with places:
                async for item in stream:
                    queue.put_nowait((index, item, None))
            queue.put_nowait((index, None, None))
        except Exception as error:
            queue.put_nowait((index, None, error))

    tasks = [asyncio.create_task(pump(i, stream)) for i, stream in enumerate(streams)]
    try:
        left = len(tasks)
        while left:
            index, item, error = await queue.get()
            if error is not None:
                raise error
            if item is None:
                left -= 1
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
