from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from slime_sandbox_local import LocalSandbox, isolation_here
from slime_sandbox_local.local import STARTS, on_thread


def test_no_more_calls_at_a_time_and_threads_that_end() -> None:
    together, most, lock = 0, 0, threading.Lock()

    def call() -> int:
        nonlocal together, most
        with lock:
            together += 1
            most = max(most, together)
        threading.Event().wait(0.01)
        with lock:
            together -= 1
        return 7

    async def one() -> int:
        return await (await on_thread("a call", call, print))

    async def many() -> list[int]:
        return await asyncio.gather(*(one() for _ in range(4 * STARTS)))

    assert asyncio.run(many()) == [7] * (4 * STARTS)
    assert most <= STARTS
    for thread in threading.enumerate():
        if thread.name == "slime: a call":
            thread.join(60)
            assert not thread.is_alive()


async def test_what_the_call_raises_frees_its_place() -> None:
    def call() -> None:
        raise OSError("no more processes")

    for _ in range(2 * STARTS):
        with pytest.raises(OSError, match="no more"):
            await (await on_thread("a call", call, print))


def test_a_result_that_comes_after_the_loop_is_given_away() -> None:
    go, given = threading.Event(), threading.Event()

    async def leave() -> None:
        await on_thread("a late call", lambda: go.wait(60), lambda _: given.set())

    asyncio.run(leave())
    go.set()
    assert given.wait(60)


@pytest.mark.skipif(not isolation_here().complete, reason=f"no complete isolation here: {isolation_here()}")
def test_sandboxes_come_and_go_where_every_default_thread_is_taken() -> None:
    async def body() -> str:
        go, pool = threading.Event(), ThreadPoolExecutor(1)
        asyncio.get_running_loop().set_default_executor(pool)
        taken = asyncio.ensure_future(asyncio.to_thread(go.wait))
        try:
            async with asyncio.timeout(120), LocalSandbox() as box:
                return (await box.exec("echo up", timeout=60)).out
        finally:
            go.set()
            await taken

    assert asyncio.run(body()) == "up\n"
