"""A sample costs the same in a rollout of many groups as in one of few; so it does where generation never stops."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest

from slime_core.rollout.pool import generate_rollout
from tests.unit.rollout.test_producer import World, continuous_args

GROWTH = 1.10
"""Most that the work for a sample may grow by when there are four times as many."""


async def _rollout(mode: str, groups: int, size: int) -> None:
    args = continuous_args(
        rollout_batch_size=groups, over_sampling_batch_size=groups, n_samples_per_prompt=size, num_rollout=1,
        sglang_server_concurrency=512, max_staleness=3,
    )  # fmt: skip
    world = World(args)
    if mode == "sync":
        taken = (await generate_rollout(args, 0, world.source, context=world.context)).samples  # type: ignore[union-attr]
    else:
        taken = (await world.producer.take(0)).groups
        await world.producer.stop()
    assert len(taken) == groups


def _calls(mode: str, groups: int) -> float:
    """Of functions, Python's and C's, per sample."""
    found = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal found
        found += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        asyncio.run(_rollout(mode, groups, 2))
    finally:
        sys.setprofile(None)
    return found / groups / 2


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "full"])
def test_a_sample_takes_as_many_calls_in_four_times_as_many_groups(mode: str) -> None:
    assert _calls(mode, 400) <= GROWTH * _calls(mode, 100)
