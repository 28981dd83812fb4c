from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from slime_sandbox_local import LocalSandbox, isolation_here
from slime_sandbox_local.local import on_thread


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
