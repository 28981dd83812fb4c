from __future__ import annotations

import asyncio
import threading

import pytest
from slime_serving.http.errors import Refused
from slime_serving.http.threads import DeadlineThreads


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
