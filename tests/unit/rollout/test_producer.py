"""Generation without end: order, staleness, rank, and unfinished groups of another size."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from slime_core.config import Args
from slime_core.data.dataset import exact_json
from slime_core.data.dumps import to_json
from slime_core.errors import CheckpointError, RolloutError
from slime_core.rollout.fate import FilterStage
from slime_core.rollout.gate import GatedEngine
from slime_core.rollout.generate import SampleRunner
from slime_core.rollout.pool import Finished, RolloutContext
from slime_core.rollout.producer import GroupProducer
from slime_core.rollout.reward import RewardStage
from slime_core.rollout.state import from_line, to_line
from slime_core.sample import Sample, SampleStatus
from tests.unit.rollout.parts import Scorer, Source, rollout_args


def continuous_args(**changes: Any) -> Args:
    return rollout_args(**{"sglang_server_concurrency": 8, "staleness_max_retries": 1, **changes})


class World:
    """An engine whose samples end when the test says so, with the version that is served then."""

    label = "generator 'test'"

    def __init__(self, args: Args, **changes: Any) -> None:
        self.args, self.version, self.hold = args, 1, False
        self.source: Any = changes.get("source") or Source(args.n_samples_per_prompt)
        self.doors: dict[int, asyncio.Future[str]] = {}
        self.began: list[int] = []
        keep: Callable[..., Any] | None = changes.get("keep")
        gated = GatedEngine(self, deterministic=False, places=args.sglang_server_concurrency)  # type: ignore[arg-type]
        runner = SampleRunner(args, gated, None, self, RewardStage(args, Scorer(), {}.__getitem__), {}.__getitem__)  # type: ignore[arg-type]
        self.context = RolloutContext(runner, FilterStage(args, keep, "test"))
        self.producer = GroupProducer(args, self.source, self.context, lambda: self.version)

    async def abort(self, rid: str | None = None) -> None:
        for door in self.doors.values():
            if not door.done():
                door.set_result("abort")

    async def call(self, args: Any, sample: Sample, sampling_params: Any, **_: Any) -> Sample:
        assert sample.index is not None
        self.began.append(sample.index)
        began, reason = self.version, "stop"
        if self.hold:
            door = self.doors[sample.index] = asyncio.get_running_loop().create_future()
            reason = await door
        if reason == "crash":
            raise ValueError("no luck")
        sample.append_response_tokens(
            tokens=[5, 6],
            log_probs=[-1.0, -1.0],
            meta_info={"finish_reason": {"type": reason}, "token_weight_versions": [began, self.version]},
        )
        return sample

    async def open(self, *groups: int, reason: str = "stop") -> None:
        """Let the samples of groups end."""
        for g in groups:
            for i in range(self.args.n_samples_per_prompt):
                door = self.doors.pop(g * self.args.n_samples_per_prompt + i)
                if not door.done():
                    door.set_result(reason)
        await turns()

    @property
    def flying(self) -> list[int]:
        return [f.original[0].group_index or 0 for f in self.producer.flights.values()]

    @property
    def waiting(self) -> list[int]:
        return [f.index for f in self.producer.waiting]


async def turns(count: int = 40) -> None:
    """Let everything that can go on do so."""
    for _ in range(count):
        await asyncio.sleep(0)


def indices(groups: list[list[Sample]]) -> list[int | None]:
    return [g[0].group_index for g in groups]


async def test_the_oldest_go_first_and_a_rollout_is_ordered_by_group() -> None:
    world = World(continuous_args(sglang_server_concurrency=8))
    world.hold = True
    taking = asyncio.create_task(world.producer.take(0))
    await turns()
    assert world.flying == [0, 1, 2, 3]
    await world.open(3, 2)
    assert indices((await taking).groups) == [2, 3]
    world.version = 2  # groups 0 and 1 began before, 4 and 5 after
    world.producer.wake()
    await turns()
    await world.open(*[g for g in world.flying if g > 1])
    await world.open(1, 0)
    assert indices((await world.producer.take(1)).groups) == [0, 1]
    await world.producer.stop()


def _aged(policy: str, **changes: Any) -> World:
    """A world in which groups are one version older than is allowed as soon as the version rises by two."""
    return World(continuous_args(max_staleness=1, staleness_policy=policy, **changes))


async def _two_versions_later(world: World) -> None:
    await world.producer.take(0)
    await turns()
    assert world.waiting == [2, 3]
    world.version += 2


async def test_a_group_that_is_too_old_is_generated_afresh() -> None:
    world = _aged("recycle")
    await _two_versions_later(world)
    taken = await world.producer.take(1)
    assert indices(taken.groups) == [2, 3]
    assert world.began.count(4) == 2  # sample 4, of group 2, again
    assert {v for g in taken.groups for s in g for v in s.token_weight_versions} == {3}
    assert taken.metrics["rollout/staleness/recycled_groups"] == 2
    assert taken.metrics["rollout/wasted_tokens"] == 8
    await world.producer.stop()


async def test_a_group_is_not_recycled_for_ever() -> None:
    world = _aged("recycle", staleness_max_retries=1)
    await _two_versions_later(world)
    world.hold = True
    taking = asyncio.create_task(world.producer.take(1))
    await turns()
    assert world.flying[:2] == [2, 3]
    world.version += 2  # they began before
    await world.open(2, 3)
    await world.open(*world.flying)
    taken = await taking
    assert 2 not in indices(taken.groups)
    assert taken.metrics["rollout/dynamic_filter/drop_stale"] == 2
    assert taken.metrics["rollout/staleness/dropped_groups"] == 2
    await world.producer.stop()


async def test_old_tokens_are_masked_and_a_group_without_young_ones_goes() -> None:
    world = _aged("mask", sglang_server_concurrency=8)
    world.hold = True
    taking = asyncio.create_task(world.producer.take(0))
    await turns()
    await world.open(0, 1)
    await taking
    await world.open(2)  # all tokens of version 1
    world.version = 3
    await world.open(3)  # of versions 1 and 3
    taking = asyncio.create_task(world.producer.take(1))
    await turns()
    await world.open(*world.flying[:1])
    taken = await taking
    assert indices(taken.groups)[0] == 3
    assert [s.loss_mask for s in taken.groups[0]] == [[0, 1], [0, 1]]
    assert taken.metrics["rollout/staleness/masked_tokens"] == 2
    assert taken.metrics["rollout/staleness/dropped_groups"] == 1
    assert taken.metrics["rollout/staleness/max"] == 0
    await world.producer.stop()


def _stored(world: World) -> list[Any]:
    lines = [to_json(to_line("continuous", g, None), "the group") for g in world.producer.open_groups()]
    return [from_line(exact_json(line))[1] for line in lines]


async def test_dropped_groups_that_come_back_keep_their_rank() -> None:
    world, again = World(continuous_args()), World(continuous_args())
    for index, spread in enumerate((0.5, 2.0, 1.0, float("-inf"))):
        group = [Sample(group_index=index, index=index, reward=0.0, status=SampleStatus.COMPLETED)]
        world.producer.put_aside(Finished(group, group, spread=spread))
    again.producer.restore_open_groups(_stored(world))
    assert [group.index for _, group in again.producer.aside] == [1, 2, 0, 3]


async def test_unfinished_groups_of_another_size_are_refused() -> None:
    world = World(continuous_args())
    world.hold = True
    taking = asyncio.create_task(world.producer.take(0))
    await turns()
    stored = _stored(world)
    await world.producer.stop()
    with pytest.raises(RolloutError):
        await taking
    with pytest.raises(CheckpointError, match="Resume with --n-samples-per-prompt 2"):
        World(continuous_args(n_samples_per_prompt=4)).producer.restore_open_groups(stored)
