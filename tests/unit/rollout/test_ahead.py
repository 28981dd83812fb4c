"""One rollout ahead: when generation begins, what waits for it, and what a commit holds."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from slime_core.config import Args
from slime_core.errors import RolloutError
from slime_core.rollout.ahead import Ahead
from slime_core.rollout.stage import RolloutResult
from slime_core.rollout.state import OpenGroups
from slime_core.sample import Group, Sample, SampleStatus


class Loop:
    """Awaits a stage's methods where they are called."""

    async def in_thread(self, call: Any, *args: Any) -> Any:
        return await call(*args)


class Stage:
    """Generates one group per rollout, once it is told to by `release`."""

    def __init__(self) -> None:
        self.weight_version = 1
        self.open_groups = OpenGroups()
        self.said: list[str] = []
        self.release: dict[int, asyncio.Future[None]] = {}

    def loop_thread(self) -> Loop:
        return Loop()

    async def start(self) -> None:
        self.said.append("start")

    async def generate_groups(self, rollout_id: int) -> tuple[list[Group], dict[str, float]]:
        self.said.append(f"generate {rollout_id}")
        version = self.weight_version
        await self.release.setdefault(rollout_id, asyncio.get_running_loop().create_future())
        sample = Sample(
            group_index=rollout_id, tokens=[1, 2, 3], response_length=2, status=SampleStatus.COMPLETED, reward=1.0
        )
        sample.token_weight_versions = [version, version]
        return [[sample]], {"rollout/x": float(rollout_id)}

    async def make_batch(self, rollout_id: int, groups: list[Group], weight_version: int) -> Any:
        return rollout_id, groups, weight_version

    async def evaluate(self, rollout_id: int) -> dict[str, float]:
        return {"eval/x": 1.0}

    async def abandon(self) -> None:
        self.said.append("abandon")

    async def stop(self) -> None:
        self.said.append("stop")

    def let(self, *rollouts: int, error: Exception | None = None) -> None:
        for rollout_id in rollouts:
            future = self.release.setdefault(rollout_id, asyncio.get_running_loop().create_future())
            future.set_exception(error) if error else future.set_result(None)


def batch(result: RolloutResult) -> tuple[int, list[Group], int]:
    """What `Stage.make_batch` was called with."""
    parts: tuple[int, list[Group], int] = result.batch  # type: ignore[assignment]
    return parts


def settings(**changes: Any) -> Args:
    return Args(**{"num_rollout": 9, **changes})


async def test_a_rollout_trained_after_a_push_is_one_version_old() -> None:
    stage = Stage()
    ahead = Ahead(settings(), stage)
    stage.let(0, 1)
    first = await ahead.generate(0)
    await ahead.before_push()
    stage.weight_version = 2
    second = await ahead.generate(1)
    assert (first.metrics["rollout/staleness/max"], second.metrics["rollout/staleness/max"]) == (0.0, 1.0)
    assert second.metrics["rollout/staleness/hist_1"] == 1.0
    assert batch(second)[2] == 2
    assert 0.0 <= second.metrics["perf/rollout_idle_fraction"] <= 1.0
    await ahead.stop()


def test_over_the_limit_tokens_are_masked_or_the_run_ends() -> None:
    async def take(**changes: Any) -> Any:
        stage = Stage()
        ahead = Ahead(settings(max_staleness=1, **changes), stage)
        stage.let(0, 1)
        await ahead.generate(0)
        await ahead.before_push()
        stage.weight_version = 4
        try:
            return await ahead.generate(1)
        finally:
            await ahead.stop()

    result = asyncio.run(take(staleness_policy="mask"))
    assert batch(result)[1][0][0].remove_sample
    assert result.metrics["rollout/staleness/masked_tokens"] == 2.0
    with pytest.raises(RolloutError, match=r"group 1 is 3 weight versions old.* --staleness-policy mask"):
        asyncio.run(take())
