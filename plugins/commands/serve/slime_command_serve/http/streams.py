"""Answers as they come: server-sent events, several engine calls behind one request, clients that go away.

A client that goes away, or a call that fails, ends all calls of the request. An invalid request raises before the
status of its stream is sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import orjson
from fastapi import Request, Response
from fastapi.responses import StreamingResponse

from slime_command_serve.http.errors import ClientGone
from slime_command_serve.http.limits import MOST_AT_ONCE

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """`value` as JSON; numbers JSON cannot hold become null."""
    return Response(orjson.dumps(value), status_code=status, headers=headers, media_type="application/json")


def event(value: Any, name: str | None = None) -> bytes:
    """One server-sent event; with a name, as Anthropic's and OpenAI's Responses API send them."""
    head = b"event: " + name.encode() + b"\n" if name else b""
    return head + b"data: " + orjson.dumps(value) + b"\n\n"


async def event_stream(
    request: Request, events: AsyncIterator[bytes], headers: dict[str, str] | None = None
) -> StreamingResponse:
    """Events as a response; what the first one raises is raised here. Raises ClientGone."""
    first = await unless_disconnected(request, anext(events, b""))

    async def body() -> AsyncIterator[bytes]:
        yield first
        async for item in events:
            yield item

    return StreamingResponse(body(), headers=headers, media_type="text/event-stream")


async def unless_disconnected(request: Request, work: Awaitable[T]) -> T:
    """Await `work`, cancelling it when the client goes away. Raises ClientGone."""

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
    """The answers of all calls, in order, `MOST_AT_ONCE` at a time. Raises what the first call that failed raised."""
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


async def merge(streams: Sequence[AsyncIterator[T]]) -> AsyncGenerator[tuple[int, T], None]:
    """(number of the stream, item) until all streams have ended, `MOST_AT_ONCE` at a time; raises what one raises."""
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
