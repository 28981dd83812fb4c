"""Generation ahead of training, without end and by one rollout: how it ends, and how old what it gives is."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import pytest
from slime_testing_probes.scripted import CharTokenizer, ScriptedEngine

from slime_core.config import Args, load_settings
from slime_core.data.dataset import exact_json
from slime_core.data.dumps import to_json
from slime_core.errors import EngineError, RolloutError
from slime_core.protocols import GenerateTraits
from slime_core.rollout.ahead import Ahead
from slime_core.rollout.event_loop import LoopThread
from slime_core.rollout.fate import FilterStage
from slime_core.rollout.pool import generate_rollout
from slime_core.rollout.producer import OWNER
from slime_core.rollout.reward import RewardStage
from slime_core.rollout.stage import RolloutParts, RolloutResult, RolloutStage
from slime_core.rollout.state import OpenGroup, OpenGroups, from_line, to_line
from slime_core.sample import Group, Sample, SampleStatus
from tests.unit.rollout.parts import Scorer, Source

FLAGS = "--hf-checkpoint none --prompt-data none --run-dir none --rm-type none --rollout-batch-size 2 --num-rollout 9"
FLAGS += " --rollout-max-response-len 4 --n-samples-per-prompt 2 --global-batch-size 4 --sglang-server-concurrency 8"


class Started(Scorer):
    async def start(self) -> None:
        """Nothing to load."""


class Run:
    """A stage and what generates in its event loop."""

    label, traits = "generator 'test'", GenerateTraits()

    def __init__(self, source: Source | None = None) -> None:
        args = load_settings([*FLAGS.split(), "--async", "--async-mode", "full"], command="train", env={}).args
        args.run_dir, self.open = None, True
        self.source, self.engine = source or Source(), ScriptedEngine([])
        parts = RolloutParts(
            self.source, generate_rollout, None, CharTokenizer(), self.engine, self,  # type: ignore[arg-type]
            RewardStage(args, Started(), {}.__getitem__), FilterStage(args, None), lambda _: self,  # type: ignore[arg-type]
        )  # fmt: skip
        self.stage = RolloutStage(args, parts, LoopThread())
        self.rollout = Ahead(args, self.stage)

    async def call(self, args: Any, sample: Sample, params: Any, **_: Any) -> Sample:
        while not self.open:
            await asyncio.sleep(0.001)
        meta = {"finish_reason": {"type": "stop"}, "weight_version": self.stage.weight_version}
        sample.append_response_tokens(tokens=[5], log_probs=[-1.0], meta_info=meta)
        return sample

    def held(self) -> list[OpenGroup]:
        """Return the state that a commit would hold now."""
        found = self.stage.between_callbacks(self.stage.open_groups.collect)
        assert {name for name, _ in found} <= {OWNER}
        return [group for _, group in found]

    async def until(self, holds: Callable[[list[OpenGroup]], bool]) -> list[OpenGroup]:
        """Wait for what a commit would hold."""
        async with asyncio.timeout(60):
            while not holds(held := self.held()):
                await asyncio.sleep(0.001)
        return held


@pytest.mark.parametrize("end", ["stop", "abandon"])
async def test_the_end_of_generation_ends_a_take_that_waits(end: str) -> None:
    run = Run()
    run.open = False
    await run.rollout.start()
    taking = asyncio.create_task(run.rollout.generate(0))
    await run.until(bool)
    await getattr(run.rollout, end)()
    with pytest.raises(RolloutError, match="generation has been stopped"):
        await asyncio.wait_for(taking, 60)
    assert run.engine.started is (end == "abandon")
    with pytest.raises(AssertionError, match="start comes first"):
        run.stage.generate_groups(0)
    await run.rollout.stop()


async def test_the_engine_is_stopped_although_it_does_not_abort() -> None:
    run = Run()
    run.open = False
    await run.rollout.start()
    taking = asyncio.create_task(run.rollout.generate(0))
    await run.until(bool)
    abort = run.engine.abort

    async def fails(rid: str | None = None) -> None:
        run.engine.abort = abort  # type: ignore[method-assign]
        raise EngineError("no answer")

    run.engine.abort = fails  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="no answer"):
        await run.rollout.stop()
    assert not run.engine.started
    run.open = True
    await asyncio.wait({taking}, timeout=60)


# -- one rollout ahead -----------------------------------------------------------------------------------


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


async def test_a_commit_with_a_metric_that_is_no_number_can_be_resumed() -> None:
    class Measured(Stage):
        async def generate_groups(self, rollout_id: int) -> tuple[list[Group], dict[str, float]]:
            groups, metrics = await super().generate_groups(rollout_id)
            return groups, {**metrics, "rollout/of_user": math.nan}

    stage = Measured()
    ahead = Ahead(settings(), stage)
    stage.let(0, 1)
    await ahead.generate(0)
    await ahead.before_save()
    lines = [to_json(to_line("ahead", group, "taken"), "the group") for group in ahead.open_groups()]
    await ahead.stop()
    resumed = Ahead(settings(), Stage())
    resumed.restore_open_groups([from_line(exact_json(line))[1] for line in lines])
    metrics = (await resumed.generate(1)).metrics
    assert metrics["rollout/x"] == 1.0
    assert math.isnan(metrics["rollout/of_user"])
    await resumed.stop()


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
