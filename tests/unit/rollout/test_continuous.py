"""`--async-mode full` over a real stage: what is trained on, what a commit gets, and how generation ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from slime_testing_probes.scripted import CharTokenizer, ScriptedEngine

from slime_core.config import load_settings
from slime_core.errors import EngineError, RolloutError, RolloutInterrupted
from slime_core.protocols import GenerateTraits
from slime_core.rollout.ahead import Ahead
from slime_core.rollout.event_loop import LoopThread
from slime_core.rollout.fate import FilterStage
from slime_core.rollout.pool import generate_rollout
from slime_core.rollout.producer import OWNER
from slime_core.rollout.reward import RewardStage
from slime_core.rollout.stage import RolloutParts, RolloutStage
from slime_core.rollout.state import OpenGroup, from_line, to_line
from slime_core.sample import Sample
from tests.unit.rollout.parts import Scorer, Source
from tests.unit.rollout.test_producer import indices

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
            RewardStage(args, Started(), None), FilterStage(args, None), lambda _: self,  # type: ignore[arg-type]
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
        """What a commit made now would hold."""
        found = self.stage.between_callbacks(self.stage.open_groups.collect)
        assert {name for name, _ in found} <= {OWNER}
        return [group for _, group in found]

    async def until(self, holds: Callable[[list[OpenGroup]], bool]) -> list[OpenGroup]:
        """Wait for what a commit would hold."""
        async with asyncio.timeout(60):
            while not holds(held := self.held()):
                await asyncio.sleep(0.001)
        return held


async def test_a_rollout_becomes_a_batch_for_the_weights_that_train() -> None:
    run = Run()
    await run.rollout.start()
    assert not run.held(), "nothing is drawn before the first weights are pushed"
    run.stage.update_weights("tensor", [], 3)
    result = await run.rollout.generate(0)
    assert [row[0] for row in result.batch.tokens] == [1] * 4
    assert result.metrics["rollout/staleness/max"] == 0
    assert "perf/rollout_idle_fraction" not in result.metrics
    await run.rollout.before_push()
    await run.rollout.before_save()
    assert await run.rollout.evaluate(0) == {}
    await run.rollout.stop()
    await run.rollout.stop()
    assert not run.engine.started


async def test_a_commit_gets_its_groups_and_gives_them_back() -> None:
    run = Run()
    await run.rollout.start()
    await run.rollout.generate(0)
    held = await run.until(lambda groups: {g.details["state"] for g in groups} == {"waiting"} and len(groups) >= 2)
    stored = [from_line(to_line(OWNER, group, None)) for group in held]
    await run.rollout.stop()

    again = Run(run.source)
    again.stage.open_groups.restore(stored)
    assert [g.group_index for g in again.held()] == [g.group_index for g in held], "before it has started, too"
    await again.rollout.start()
    groups, _ = await again.stage.loop_thread().in_thread(again.stage.generate_groups, 1)
    assert indices(groups) == [2, 3]
    await again.rollout.stop()


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


async def test_generation_begins_anew_after_it_was_abandoned() -> None:
    run = Run()
    await run.rollout.start()
    await run.rollout.generate(0)
    await run.rollout.abandon()
    again = Ahead(run.stage.args, run.stage)
    await again.start()
    assert (await again.generate(0)).metrics["rollout/groups_drawn"] >= 2
    await again.stop()


async def test_an_interrupted_run_keeps_what_is_finished_and_gives_back_the_rest() -> None:
    run = Run()
    await run.rollout.start()
    await run.rollout.generate(0)
    waiting = await run.until(lambda groups: {g.details["state"] for g in groups} == {"waiting"} and len(groups) >= 2)
    run.stage.interrupt()
    with pytest.raises(RolloutInterrupted):
        await run.rollout.generate(1)
    await run.rollout.before_save()
    assert run.held() == waiting
    await run.rollout.stop()


async def test_what_generation_raised_reaches_whoever_takes() -> None:
    run = Run()
    run.source = SimpleNamespace(get_samples=lambda count: [])  # type: ignore[assignment]
    run.stage.source = run.source
    await run.rollout.start()
    with pytest.raises(RolloutError, match="get_samples"):
        await run.rollout.generate(0)
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
