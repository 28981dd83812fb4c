"""A reward that keeps the event loop to itself is named."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from types import SimpleNamespace

import pytest

from slime_core.plugins.workers import watch as loop_watch
from slime_core.plugins.workers.watch import watched, watching


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_watch, "_WATCH", loop_watch._Watch())
    monkeypatch.setattr(loop_watch, "THRESHOLD", 0.05)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """`now` passes as the test says; the thread that looks while a step runs sleeps on."""
    made = SimpleNamespace(now=0.0)
    monkeypatch.setattr(loop_watch, "_POLL", 3600.0)
    monkeypatch.setattr(time, "perf_counter", lambda: made.now)
    return made


async def test_results_exceptions_and_cancellation_pass_through() -> None:
    async def fine():
        await asyncio.sleep(0)
        return await asyncio.sleep(0.01, 7)

    async def bad():
        await asyncio.sleep(0)
        raise KeyError("x")

    async def catches():
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            return "cleaned up"

    assert await watched("it", fine()) == 7
    with pytest.raises(KeyError):
        await watched("it", bad())
    future = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(future.set_result, 3)
    assert await watched("it", future) == 3

    async def through():
        return await watched("it", catches())

    task = asyncio.create_task(through())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    assert await task == "cleaned up"


async def test_computing_in_a_coroutine_warns_once_with_its_name(caplog: pytest.LogCaptureFixture) -> None:
    async def computes():
        await asyncio.sleep(0)
        time.sleep(0.1)
        return 1

    for _ in range(2):
        await watched("reward 'slow'", computes())
    (message,) = caplog.messages
    assert re.match(r"reward 'slow' has kept the event loop busy for \d+\.\d s", message)
    assert "execution='process'" in message


async def test_waiting_is_no_computing(clock: SimpleNamespace, caplog: pytest.LogCaptureFixture) -> None:
    released = asyncio.Event()

    def later() -> None:
        clock.now += 10
        released.set()

    asyncio.get_running_loop().call_soon(later)
    await watched("reward 'waits'", released.wait())
    assert caplog.messages == []


def test_what_never_returns_is_reported_while_it_runs_with_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    said, text = threading.Event(), []
    monkeypatch.setattr(loop_watch.logger, "warning", lambda *a: (text.append(a[0] % a[1:]), said.set()))
    with watching("reward 'stuck'"):
        assert said.wait(60), "reported only afterwards"
    assert "reward 'stuck'" in text[0]
    assert "now at " in text[0]


async def test_other_rewards_in_between_are_not_blamed(
    clock: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    async def brief():
        for _ in range(5):
            await asyncio.sleep(0)

    async def long():
        await asyncio.sleep(0)
        clock.now += 0.1

    await asyncio.gather(watched("brief", brief()), watched("long", long()))
    assert [m.split(" has")[0] for m in caplog.messages] == ["long"]
