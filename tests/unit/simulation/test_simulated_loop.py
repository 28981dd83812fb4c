"""The virtual-time event loop: deadlocks, death, and faults."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import pytest

from tests.simulation.faults import Fault, Faults, Killed
from tests.simulation.loop import Deadlock, SimulatedLoop


@pytest.fixture
def loop() -> Iterator[SimulatedLoop]:
    loop = SimulatedLoop(random.Random(1), max_turns=5000)
    yield loop
    loop.discard()


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
