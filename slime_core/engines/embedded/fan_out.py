"""Several engine calls behind one HTTP request: all answers together, or their streams merged as they come.

`/generate` with a batch or `n`, and OpenAI's endpoints with several choices, use the same two functions. Whoever goes
away, or fails, ends all calls of the request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

from fastapi import Request

from slime_core.engines.embedded.wire import unless_disconnected
from slime_core.types import GenerationOutput

Call = Callable[[], Coroutine[Any, Any, GenerationOutput]]


async def gather_outputs(request: Request, calls: Sequence[Call]) -> list[GenerationOutput]:
    """The answers of all calls, in order. Raises ClientGone, or what the first call that failed raised."""

    async def everything() -> list[GenerationOutput]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call()) for call in calls]
        return [task.result() for task in tasks]

    try:
        return await unless_disconnected(request, everything())
    except BaseExceptionGroup as error:
        raise error.exceptions[0] from None


async def merge_streams(
    streams: Sequence[AsyncIterator[GenerationOutput]],
) -> AsyncGenerator[tuple[int, GenerationOutput], None]:
    """(number of the stream, output) until all streams have ended; raises what one of them raises."""
    queue: asyncio.Queue[tuple[int, GenerationOutput | BaseException | None]] = asyncio.Queue()

    async def pump(index: int, stream: AsyncIterator[GenerationOutput]) -> None:
        try:
            async for output in stream:
                queue.put_nowait((index, output))
            queue.put_nowait((index, None))
        except Exception as error:
            queue.put_nowait((index, error))

    tasks = [asyncio.create_task(pump(i, stream)) for i, stream in enumerate(streams)]
    try:
        left = len(tasks)
        while left:
            index, output = await queue.get()
            if isinstance(output, BaseException):
                raise output
            if output is None:
                left -= 1
            else:
                yield index, output
    finally:
        for task in tasks:
            task.cancel()
