"""The virtual-time event loop: time, order, ends, threads and death."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.simulation.faults import Fault, Faults, Killed
from tests.simulation.loop import Deadlock, SimulatedLoop
from tests.simulation.threads import Runner, Threads


@pytest.fixture
def loop() -> Iterator[SimulatedLoop]:
    loop = SimulatedLoop(random.Random(1), max_turns=5000)
    yield loop
    loop.discard()


def test_time_jumps_to_the_next_timer_and_stands_still_otherwise(loop: SimulatedLoop) -> None:
    seen: list[tuple[str, float]] = []

    async def sleeper(name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        seen.append((name, loop.time()))

    async def main() -> None:
        await asyncio.gather(sleeper("day", 86400.0), sleeper("hour", 3600.0), sleeper("now", 0.0))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(100):
                await asyncio.Event().wait()

    began = time.monotonic()
    loop.run(main())
    assert seen == [("now", 0.0), ("hour", 3600.0), ("day", 86400.0)]
    assert loop.time() == 86500.0
    assert time.monotonic() - began < 5


def test_a_wait_without_an_end_is_a_deadlock_that_names_who_waits_where(loop: SimulatedLoop) -> None:
    async def forgotten(event: asyncio.Event) -> None:
        await event.wait()

    async def main() -> None:
        await asyncio.create_task(forgotten(asyncio.Event()), name="the forgotten one")

    with pytest.raises(Deadlock, match=r"the forgotten one: .*forgotten \(test_simulated_loop\.py:\d+\) > Event\.wait"):
        loop.run(main())


def test_after_a_kill_not_one_more_callback_runs(loop: SimulatedLoop) -> None:
    seen: list[str] = []

    async def other() -> None:
        try:
            await asyncio.sleep(10)
        finally:
            seen.append("cleaned up")

    async def main() -> None:
        asyncio.get_running_loop().create_task(other())
        await asyncio.sleep(1)
        loop.kill(Killed("now"))
        asyncio.get_running_loop().call_soon(seen.append, "went on")
        await asyncio.sleep(0)
        seen.append("went on")

    with pytest.raises(Killed):
        loop.run(main())
    assert seen == []


def test_threads_take_turns_and_wait_for_coroutines_of_the_loop(loop: SimulatedLoop) -> None:
    threads = Threads(loop)
    runner = Runner(loop, threads)
    seen: list[tuple[str, float]] = []

    def blocking(name: str, seconds: float) -> str:
        runner.run(asyncio.sleep(seconds))
        seen.append((name, loop.time()))
        runner.run(asyncio.sleep(seconds))
        return name

    def failing() -> None:
        runner.run(asyncio.wait_for(asyncio.Event().wait(), 5))

    async def main() -> list[Any]:
        calls = [threads.call(lambda n=n: blocking(str(n), n)) for n in (3, 1, 2)]
        return await asyncio.gather(*calls, threads.call(failing), return_exceptions=True)

    *names, error = loop.run(main())
    assert names == ["3", "1", "2"]
    assert isinstance(error, TimeoutError)
    assert seen == [("1", 1.0), ("2", 2.0), ("3", 3.0)]
    assert loop.time() == 6.0


def test_faults_strike_once_at_their_event_and_read_as_they_are_written() -> None:
    schedule = [Fault("engine", 2, "hang"), Fault("driver", 4, "kill"), Fault("save", 9, "slow")]
    assert [Fault.parse(str(fault)) for fault in schedule] == schedule
    faults = Faults(schedule)
    found = [faults.at(place) for place in ("engine", "reward", "engine", "engine", "reward", "engine")]
    assert found == [None, None, None, "hang", "kill", None]
    assert faults.struck == [Fault("engine", 2, "hang"), Fault("driver", 4, "kill")]
    for wrong in ("engine", "engine[x]=hang", "engine[1]=fly", "nowhere[1]=kill"):
        with pytest.raises(ValueError, match=r"is no fault; write PLACE\[NUMBER\]=KIND"):
            Fault.parse(wrong)
