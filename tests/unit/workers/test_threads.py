from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time

import pytest

from slime_core.workers import call
from slime_core.workers.call import on_thread


async def test_a_call_that_is_cancelled_is_abandoned_and_its_thread_is_used_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(call, "_idle", [])
    started, release, idents = threading.Event(), threading.Event(), []

    def hang() -> None:
        idents.append(threading.get_ident())
        started.set()
        release.wait(30)

    task = asyncio.create_task(on_thread(hang))
    assert await asyncio.to_thread(started.wait, 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.wait_for(on_thread(threading.get_ident), 10) not in idents
    release.set()

    def together(gate: threading.Barrier) -> int:
        gate.wait()
        return threading.get_ident()

    deadline, found = time.monotonic() + 10, set[int]()
    while not found & set(idents):
        assert time.monotonic() < deadline
        number = len(call._idle) + 1  # all idle threads, of other tests, too
        gate = threading.Barrier(number, timeout=10)
        found |= set(await asyncio.gather(*(on_thread(lambda g=gate: together(g)) for _ in range(number))))


def test_a_hanging_reward_delays_neither_the_others_nor_the_exit() -> None:
    code = """
import asyncio, threading, os
from slime_core import Sample
from slime_core.config import Args
from slime_core.plugins import adapters
from slime_core.plugins.adapters import RewardCaller
from slime_core.plugins.registry import Registry
from slime_core.plugins.resolve import resolve
from slime_core.workers.call import Slots

adapters._THREADS = Slots(3)

def reward(args, sample):
    if sample.index < 3:
        threading.Event().wait()
    return 1.0

registry = Registry()
registry.add_object("rewards", "mine", reward)
caller = RewardCaller(resolve("rewards", "mine", registry=registry), Args())

async def score(index):
    try:
        async with asyncio.timeout(0.3 if index < 3 else 20):
            return (await caller.score([Sample(index=index)]))[0]
    except TimeoutError:
        return None

async def main():
    return await asyncio.gather(*(score(i) for i in range(8)))

found = asyncio.run(main())
assert found == [None] * 3 + [1.0] * 5, found
print("done")
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout == "done\n"
