from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest

from slime_core.plugins.threads import AbandonableThreadPool


def test_results_errors_and_the_limit() -> None:
    pool = AbandonableThreadPool(3)
    running, most = 0, 0
    lock, gate = threading.Lock(), threading.Barrier(3, timeout=60)

    def work(value: int) -> int:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        gate.wait()
        with lock:
            running -= 1
        return value

    futures = [pool.submit(work, value) for value in range(12)]
    assert [future.result(60) for future in futures] == list(range(12))
    assert most == 3
    with pytest.raises(ZeroDivisionError):
        pool.submit(lambda: 1 // 0).result(60)


def test_a_thread_that_never_returns_is_replaced() -> None:
    pool = AbandonableThreadPool(1)
    started, release = threading.Event(), threading.Event()

    def hang() -> None:
        started.set()
        release.wait(30)

    stuck = pool.submit(hang)
    queued = pool.submit(lambda: "queued")
    assert started.wait(60)
    pool.abandon(stuck)
    assert queued.result(60) == "queued"
    release.set()
    stuck.result(60)
    assert pool.submit(lambda: "later").result(60) == "later"


def test_a_queued_call_that_is_abandoned_never_runs() -> None:
    pool = AbandonableThreadPool(1)
    release, ran = threading.Event(), []
    first = pool.submit(release.wait, 30)
    second = pool.submit(ran.append, 1)
    pool.abandon(second)
    release.set()
    first.result(60)
    pool.submit(lambda: None).result(60)
    assert ran == []


def test_a_hanging_reward_delays_neither_the_others_nor_the_exit() -> None:
    code = """
import asyncio, threading, os
from slime_core import Sample
from slime_core.config import Args
from slime_core.plugins.adapters import RewardCaller, _THREADS
from slime_core.plugins.registry import Registry
from slime_core.plugins.resolve import resolve

def reward(args, sample):
    if sample.index < _THREADS.max_workers:
        threading.Event().wait()
    return 1.0

registry = Registry()
registry.add_object("rewards", "mine", reward)
caller = RewardCaller(resolve("rewards", "mine", registry=registry), Args())

async def score(index):
    try:
        async with asyncio.timeout(0.3 if index < _THREADS.max_workers else 20):
            return (await caller.score([Sample(index=index)]))[0]
    except TimeoutError:
        return None

async def main():
    return await asyncio.gather(*(score(i) for i in range(_THREADS.max_workers + 5)))

found = asyncio.run(main())
assert found == [None] * _THREADS.max_workers + [1.0] * 5, found
print("done")
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout == "done\n"


def test_it_serves_an_event_loop() -> None:
    async def run() -> list[int]:
        loop, pool = asyncio.get_running_loop(), AbandonableThreadPool(4)
        return list(await asyncio.gather(*(loop.run_in_executor(pool, lambda v=v: v * v) for v in range(50))))

    assert asyncio.run(run()) == [v * v for v in range(50)]


async def test_an_awaited_call_that_is_cancelled_is_given_up() -> None:
    pool = AbandonableThreadPool(1)
    started, release = threading.Event(), threading.Event()

    def hang() -> None:
        started.set()
        release.wait(30)

    task = asyncio.create_task(pool.call(hang))
    assert await asyncio.to_thread(started.wait, 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.wait_for(pool.call(lambda: 7), 10) == 7
    release.set()
    with pytest.raises(ZeroDivisionError):
        await pool.call(lambda: 1 // 0)
