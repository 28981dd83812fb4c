from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from slime_serving.http.streams import event_stream


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
