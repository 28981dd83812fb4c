"""Shares of the event loop's time."""

from __future__ import annotations

import asyncio
import itertools

from slime_core.waits.pace import Pace


def test_many_at_once_let_others_in_between_and_keep_their_order() -> None:
    async def run() -> list[str]:
        seen: list[str] = []
        pace = Pace(asyncio.get_running_loop(), seconds=0.0)  # one in each turn of the loop

        async def one(number: int) -> None:
            await pace.turn()
            seen.append(f"work {number}")

        tasks = [asyncio.ensure_future(one(n)) for n in range(4)]
        await asyncio.sleep(0)
        tasks.append(asyncio.ensure_future(one(4)))  # behind those who wait
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0)
            seen.append("other")
        return seen

    seen = asyncio.run(asyncio.wait_for(run(), 60))
    assert [entry for entry in seen if entry != "other"] == [f"work {n}" for n in range(5)]
    at = [seen.index(f"work {n}") for n in range(5)]
    assert all("other" in seen[one:two] for one, two in itertools.pairwise(at))


async def test_who_is_cancelled_in_the_queue_holds_nobody_up() -> None:
    pace, seen = Pace(asyncio.get_running_loop(), seconds=0.0), list[int]()

    async def one(number: int) -> None:
        await pace.turn()
        seen.append(number)

    tasks = [asyncio.ensure_future(one(n)) for n in range(6)]
    await asyncio.sleep(0)
    for number in (2, 3, 5):
        tasks[number].cancel()
    await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
    assert seen == [0, 1, 4]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert pace._began is None
    assert not pace._draining
