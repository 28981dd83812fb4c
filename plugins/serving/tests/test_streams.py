"""Streams of the front, and threads that end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
from slime_serving.http.errors import Refused
from slime_serving.http.streams import event_stream
from slime_serving.http.threads import DeadlineThreads


class Connected:
    """A request whose client stays."""

    async def receive(self) -> Any:
        await asyncio.Event().wait()


async def test_others_are_answered_between_the_pieces_of_a_large_answer() -> None:
    order: list[str] = []

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b"data"

    async def ping() -> None:
        while True:
            order.append("ping")
            await asyncio.sleep(0)

    response = await event_stream(Connected(), pieces())  # type: ignore[arg-type]
    other = asyncio.create_task(ping())
    async for _ in response.body_iterator:
        order.append("piece")
    other.cancel()
    assert order.count("piece") == 20
    assert "piece piece piece" not in " ".join(order)


def spins() -> None:
    while True:
        pass


async def test_a_thread_serves_call_after_call_but_none_after_one_that_was_ended() -> None:
    threads = DeadlineThreads(60.0)
    first = await threads.call("a", threading.current_thread)
    for _ in range(200):  # until it waits for the next one
        if threads._idle:
            break
        await asyncio.sleep(0.01)
    assert await threads.call("b", threading.current_thread) is first
    threads.deadline = 0.2
    with pytest.raises(Refused, match=r"longer than 0\.2 s"):
        await threads.call("c", spins)
    threads.deadline = 60.0
    assert [await threads.call("d", int) for _ in range(9)] == [0] * 9
