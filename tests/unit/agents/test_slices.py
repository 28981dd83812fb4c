"""Work in slices of the event loop's time."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from slime_core.agents.slices import TimeSlices


def test_much_work_at_once_lets_others_in_between_and_keeps_its_order() -> None:
    async def run() -> list[str]:
        seen: list[str] = []
        slices = TimeSlices(seconds=0.0)  # one piece in each turn of the loop
        pieces = [asyncio.ensure_future(slices.run(lambda n=n: seen.append(f"work {n}"))) for n in range(4)]  # type: ignore[misc]
        while not all(piece.done() for piece in pieces):
            await asyncio.sleep(0)
            seen.append("other")
        return seen

    seen = asyncio.run(run())
    assert [entry for entry in seen if entry != "other"] == [f"work {n}" for n in range(4)]
    at = [seen.index(f"work {n}") for n in range(4)]
    assert all("other" in seen[one:two] for one, two in itertools.pairwise(at))


def test_work_within_a_slice_runs_at_once() -> None:
    async def run() -> None:
        slices, seen = TimeSlices(seconds=60.0), []
        for n in range(3):
            await slices.run(lambda n=n: seen.append(n))  # type: ignore[misc]
        assert seen == [0, 1, 2]
        assert slices._spent > 0
        await asyncio.sleep(0)
        assert slices._spent == 0, "each turn of the loop has its own"

    asyncio.run(run())


def test_errors_reach_who_waits_and_cancelled_work_is_left() -> None:
    async def run() -> None:
        slices, seen = TimeSlices(seconds=0.0), []

        def fails() -> None:
            raise ValueError("no such thing")

        wrong = asyncio.ensure_future(slices.run(fails))
        left = asyncio.ensure_future(slices.run(lambda: seen.append("left")))
        right = asyncio.ensure_future(slices.run(lambda: 3))
        await asyncio.sleep(0)
        left.cancel()
        with pytest.raises(ValueError, match="no such thing"):
            await wrong
        assert await right == 3
        assert seen == []

    asyncio.run(run())
