"""`ContinuousRollout` over a stand-in stage: what it asks of whom, in which order, and what a commit gets."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from slime_core.errors import RolloutError
from slime_core.rollout.continuous import OWNER, ContinuousRollout
from slime_core.rollout.open_groups import OpenGroup, OpenGroups, from_line, to_line
from slime_core.rollout.producer import GroupProducer
from tests.unit.rollout.test_producer import World, _args, indices, turns


class Stage:
    """Everything in one event loop."""

    def __init__(self, world: World) -> None:
        self.world, self.open_groups = world, OpenGroups()
        self.calls: list[Any] = []

    @property
    def weight_version(self) -> int:
        return self.world.version

    async def start(self) -> None:
        self.calls.append("start")

    def producer(self) -> GroupProducer:
        return self.world.producer

    def loop_thread(self) -> Stage:
        return self

    async def in_thread(self, call: Any, *args: Any) -> Any:
        return await call(*args)

    async def wait(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return await asyncio.create_task(coroutine)

    async def conclude(
        self, rollout_id: int, groups: Any, decided: Any, extra: Any, started: float
    ) -> dict[str, float]:
        self.calls.append(("conclude", rollout_id, indices(groups), indices(decided)))
        return extra

    async def make_batch(self, rollout_id: int, groups: Any, weight_version: int) -> Any:
        return rollout_id, weight_version

    async def evaluate(self, rollout_id: int) -> dict[str, float]:
        return {"eval/held": 1.0}

    async def abandon(self) -> None:
        self.calls.append("abandon")

    async def stop(self) -> None:
        self.calls.append("stop")


def _continuous(world: World) -> tuple[ContinuousRollout, Stage]:
    world.args.deterministic_mode = True
    stage = Stage(world)
    return ContinuousRollout(world.args, stage), stage


async def test_a_rollout_is_concluded_and_becomes_a_batch_for_the_weights_that_train() -> None:
    world = World(_args())
    rollout, stage = _continuous(world)
    await rollout.start()
    assert not world.began  # before the first weights are pushed
    world.version = 3
    result = await rollout.generate(0)
    assert result.batch == (0, 3)
    assert result.metrics["rollout/staleness/max"] == 0
    await rollout.before_push()
    await rollout.before_save()
    assert await rollout.evaluate(0) == {"eval/held": 1.0}
    await rollout.stop()
    await rollout.stop()
    assert stage.calls == ["start", ("conclude", 0, [0, 1], [0, 1]), "stop", "stop"]


async def test_a_commit_gets_its_groups_and_gives_them_back() -> None:
    world = World(_args())
    rollout, stage = _continuous(world)
    await rollout.start()
    await rollout.generate(0)
    await turns()
    stored = [from_line(to_line(name, group, None)) for name, group in stage.open_groups.collect()]
    assert {name for name, _ in stored} == {OWNER}
    held = [group.group_index for _, group in stored]
    await rollout.stop()

    world = World(_args(), source=world.source)
    again, stage = _continuous(world)
    stage.open_groups.restore(stored)
    assert [group.group_index for _, group in stage.open_groups.collect()] == held  # before it has started, too
    await again.start()
    await again.generate(1)
    assert stage.calls[-1][2] == held[:2]
    await again.stop()


async def test_stop_ends_a_take_that_waits() -> None:
    world = World(_args())
    world.hold = True
    rollout, stage = _continuous(world)
    await rollout.start()
    taking = asyncio.create_task(rollout.generate(0))
    await turns()
    await rollout.stop()
    with pytest.raises(RolloutError, match="stopped"):
        await taking
    assert stage.calls[-1] == "stop"


async def test_a_cancelled_take_leaves_the_groups_where_they_are() -> None:
    world = World(_args())
    world.hold = True
    rollout, stage = _continuous(world)
    await rollout.start()
    taking = asyncio.create_task(rollout.generate(0))
    await turns()
    await world.open(1)
    taking.cancel()
    await asyncio.wait({taking})
    groups: list[OpenGroup] = [group for _, group in stage.open_groups.collect()]
    assert [g.details["state"] for g in groups if g.group_index == 1] == ["waiting"]
    await rollout.stop()


async def test_generation_that_is_abandoned_leaves_the_engine_up() -> None:
    world = World(_args())
    world.hold = True
    rollout, stage = _continuous(world)
    await rollout.start()
    taking = asyncio.create_task(rollout.generate(0))
    await turns()
    assert world.producer.pool.flights
    await rollout.abandon()
    assert not world.producer.pool.flights
    with pytest.raises(RolloutError, match="stopped"):
        await taking
    assert stage.calls[-1] == "abandon"
    assert "stop" not in stage.calls
