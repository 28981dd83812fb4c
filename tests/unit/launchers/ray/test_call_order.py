"""Calls by number: each begins when all before it have, and one that never comes is an error of those behind it."""

from __future__ import annotations

import asyncio
import random

import pytest
from slime_launcher_ray.engine_actor import CallOrder

from slime_core.errors import EngineError


@pytest.mark.parametrize("seed", range(5))
async def test_in_order(seed: int) -> None:
    turns, begun = CallOrder(patience=60.0), []

    async def call(number: int) -> None:
        await turns.come(number)
        begun.append(number)
        turns.begun()

    numbers = list(range(20))
    random.Random(seed).shuffle(numbers)
    await asyncio.gather(*map(call, numbers))
    assert begun == list(range(20))


async def test_one_that_does_not_come() -> None:
    turns = CallOrder(patience=0.01)
    with pytest.raises(EngineError, match="call 0 of the rollout actor did not come"):
        await turns.come(1)
    await turns.come(0)
    turns.begun()
    await turns.come(1)
