from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from slime_sandbox_local import LocalSandbox, isolation_here
from slime_sandbox_local.blocking import STARTS, ended, on_thread

from slime_core.procs.guarded import Guarded

WAITS = "import sys; sys.stdin.read()"


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


def test_what_the_call_raises_frees_its_place() -> None:
    def call() -> None:
        raise OSError("no more processes")

    async def many() -> None:
        for _ in range(2 * STARTS):
            with pytest.raises(OSError, match="no more"):
                await (await on_thread("a call", call, print))

    asyncio.run(many())


def test_a_result_that_comes_after_the_loop_is_given_away() -> None:
    go, given = threading.Event(), threading.Event()

    async def leave() -> None:
        await on_thread("a late call", lambda: go.wait(60), lambda _: given.set())

    asyncio.run(leave())
    go.set()
    assert given.wait(60)


def descriptors() -> set[tuple[str, str]]:
    """What is open in this process; other tests' garbage may be closed at any moment."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            found.add((number, os.readlink(f"/proc/self/fd/{number}")))
    return found


def test_the_end_of_a_process() -> None:
    async def body() -> None:
        process = Guarded("a child", stop_s=0.0, leftover_s=0.0)
        process.start([sys.executable, "-c", WAITS], stdin=subprocess.PIPE)
        before = descriptors()
        try:
            assert not await ended(process, "a child", 0.05, "nothing")
            process.stdin.close()
            assert await ended(process, "a child", 60, "nothing")
            assert process.poll() == 0
            assert await ended(process, "a child", 60, "nothing"), "it has been reaped"
            assert descriptors() <= before, "none was left open"
        finally:
            process.kill()

    asyncio.run(body())


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
