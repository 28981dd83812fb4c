"""Over many random runs: no drawn group is lost or trained twice, metrics add up, nothing waits for ever, and how long
anything takes (rewards, a share of the loop's time, the engine's next look at the gate) changes neither what is
accepted nor which requests share an engine step."""

from __future__ import annotations

import asyncio
import copy
import random
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from slime_core.errors import RolloutError
from slime_core.rollout import gate
from slime_core.rollout.fate import FilterStage
from slime_core.rollout.gate import GatedEngine
from slime_core.rollout.generate import SampleRunner
from slime_core.rollout.pool import RolloutContext, generate_rollout
from slime_core.rollout.reward import RewardStage
from slime_core.sample import FilterDecision, Sample
from slime_core.sample.types import executions
from tests.unit.rollout.parts import Scorer, Source, rollout_args

ROLLOUTS = 4


async def some_turns(clock: random.Random, most: int) -> None:
    """Let the loop turn as often as chance says, or not at all."""
    for _ in range(clock.randrange(most)):
        await asyncio.sleep(0)


class Engine:
    """Answers every request in one step, whenever it looks and may; hands out `abort` to those waiting then."""

    def __init__(self, clock: random.Random) -> None:
        self.may_step, self.clock = lambda: True, clock
        self.waiting: dict[str, asyncio.Future[str]] = {}
        self.steps: list[list[str]] = []
        """Who was in it, step by step."""

    def notify(self) -> None:
        """It looks without being told."""

    async def drive(self) -> None:
        while True:
            await asyncio.sleep(0)
            await some_turns(self.clock, 3)
            if self.waiting and self.may_step():
                self.steps.append(sorted(self.waiting))
                self._answer("stop")

    async def abort(self, rid: str | None = None) -> None:
        self._answer("abort")

    def _answer(self, how: str) -> None:
        for future in self.waiting.values():
            future.set_result(how)
        self.waiting.clear()

    async def generate(self, input_ids: Any, params: Any, *, rid: str, session_id: Any = None) -> Any:
        self.waiting[rid] = asyncio.get_running_loop().create_future()
        return await self.waiting[rid]


class Generator:
    """Takes as many engine steps as the sample's number says; some raise, some fan out, some abort by themselves."""

    label = "generator 'random'"

    def __init__(self, traits: SimpleNamespace) -> None:
        self.traits = traits
        self.aborted: set[int] = set()

    async def call(
        self, args: Any, sample: Sample, params: Any, *, evaluation: bool = False, context: Any = None
    ) -> Any:
        steps, broken, fans_out, aborts = self.fate(sample)
        for _ in range(steps):
            rid = f"{sample.group_index}/{sample.index}"  # the greedy one has no number of its own
            if await context.engine.generate(sample.tokens, params, rid=rid) == "abort":
                sample.append_response_tokens(
                    tokens=[5], log_probs=[-1.0], meta_info={"finish_reason": {"type": "abort"}}
                )
                return sample
        if broken:
            raise ValueError("no luck")
        reason = "abort" if aborts and sample.index not in self.aborted else "stop"
        self.aborted.add(sample.index)  # type: ignore[arg-type]
        siblings = [sample, copy.deepcopy(sample)] if fans_out else [sample]
        for one in siblings:
            kind = reason if one is siblings[-1] else "stop"  # of a fan-out only the second one is interrupted
            one.append_response_tokens(tokens=[5], log_probs=[-1.0], meta_info={"finish_reason": {"type": kind}})
        return siblings if len(siblings) > 1 else sample

    def fate(self, sample: Sample) -> tuple[int, bool, bool, bool]:
        """Engine steps, and whether it raises, fans out, and is interrupted the first time."""
        rng = random.Random(f"{self.traits.seed} {sample.index}")
        steps, broken = rng.choice([1, 1, 2, 5]), rng.random() < self.traits.broken
        fans_out, aborts = rng.random() < self.traits.fan_out, rng.random() < self.traits.aborts
        return steps, broken, fans_out, aborts


class Slow(Scorer):
    """Rewards take as many turns of the loop as `clock` says, and a few fail."""

    def __init__(self, traits: SimpleNamespace, clock: random.Random) -> None:
        self.traits, self.clock = traits, clock
        self.batched = self.scores_groups = traits.scores_groups

    async def score(self, samples: list[Sample], evaluation: bool) -> list[Any]:
        await some_turns(self.clock, 20)
        if self.traits.seed % 5 == 0 and samples[0].index is not None and samples[0].index % 11 == 7:
            raise KeyError("reward")
        return [float(random.Random(f"{s.index}").random() < 0.5) for s in samples]


def _traits(seed: int) -> SimpleNamespace:
    rng = random.Random(seed)
    batch = rng.randint(1, 5)
    return SimpleNamespace(
        seed=seed, broken=rng.choice([0, 0.2]), fan_out=rng.choice([0, 0.3]), aborts=rng.choice([0, 0.1]),
        scores_groups=rng.random() < 0.3, filtered=rng.choice([0, 0.4]), baseline=rng.random() < 0.3,
        args=rollout_args(
            rollout_batch_size=batch, over_sampling_batch_size=batch + rng.randint(0, 4),
            partial_rollout=rng.random() < 0.6, mask_offpolicy_in_partial_rollout=rng.random() < 0.3,
            sglang_server_concurrency=rng.choice([1, 2, 3, 5, 64]),
            dynamic_sampling_on_exhausted=rng.choice(["stop", "keep", "shrink"]), dynamic_sampling_budget=6,
            group_timeout=rng.choice([None, 1000.0]), group_timeout_policy=rng.choice(["retry", "shrink"]),
        ),
    )  # fmt: skip


def _play(seed: int, pace: int) -> tuple[list[Any], list[list[str]]]:
    """What each rollout accepted and left behind, and who shared each engine step; checks the books on the way.

    `pace` decides how long everything takes.
    """
    clock = random.Random(pace)
    traits, source, engine = _traits(seed), Source(), Engine(clock)
    args = traits.args

    def keep(args: Any, group: list[Sample]) -> FilterDecision:
        rng = random.Random(f"{seed} {group[0].group_index}")
        drop = rng.random() < traits.filtered
        return FilterDecision(not drop, "unlucky" if drop else None, keep_when_insufficient=rng.random() < 0.3)

    async def go() -> list[Any]:
        driver = asyncio.create_task(engine.drive())
        gated: Any = GatedEngine(engine, deterministic=True, places=args.sglang_server_concurrency)  # type: ignore[arg-type]
        rewards = RewardStage(args, Slow(traits, clock), {}.__getitem__)  # type: ignore[arg-type]
        runner = SampleRunner(
            args, gated, None, Generator(traits), rewards, {}.__getitem__,  # type: ignore[arg-type]
            greedy_baseline=traits.baseline,
        )  # fmt: skip
        story: list[Any] = []
        settled: list[int] = []
        trained: list[int | None] = []
        for rollout_id in range(ROLLOUTS):
            context = RolloutContext(runner, FilterStage(args, keep, "test"), decided=[])
            try:
                async with asyncio.timeout(120):
                    out = await generate_rollout(args, rollout_id, source, context=context)
            except RolloutError as error:
                story.append(str(error))
                break
            finally:
                assert runner.stopping is False
                assert (gated._live, gated._waiting, len(gated._queue)) == (0, 0, 0), "somebody is still inside"
                assert gated._free == args.sglang_server_concurrency
            accepted = [g[0].group_index for g in out.samples]
            assert context.decided is not None
            settled += [g[0].group_index or 0 for g in context.decided]
            waiting = [g[0].group_index for g in source.returned]
            trained += accepted
            assert len(set(trained)) == len(trained), "trained twice"
            assert not set(trained) & set(waiting), "trained and to be drawn again"
            for group in [*out.samples, *source.returned]:
                _check_siblings(group, Generator(traits), source.size)
            # With "shrink", groups that were decided on go back where they do not fill a step.
            gone = [index for index in settled if index not in waiting]
            assert sorted([*set(gone), *waiting]) == list(range(source.next)), "lost, or in two places"
            _check_books(out.metrics, len(accepted))
            story.append((accepted, waiting))
        driver.cancel()
        return story

    with mock.patch.object(gate, "loop_turn", partial(some_turns, clock, 6)):
        return asyncio.run(go()), engine.steps


def _check_siblings(group: list[Sample], generator: Generator, size: int) -> None:
    """A group has an execution for each of its samples; a finished fan-out has both of its siblings."""
    members = executions(group)
    assert [e[0].index for e in members] == [group[0].group_index * size + i for i in range(size)]  # type: ignore[operator]
    for siblings in members:
        _, broken, fans_out, _ = generator.fate(siblings[0])
        done = siblings[0].status in (Sample.Status.COMPLETED, Sample.Status.TRUNCATED)
        assert len(siblings) == (2 if fans_out and not broken and done else len(siblings))
        assert len({s.status for s in siblings}) == 1 or any(s.status == Sample.Status.FAILED for s in siblings)
        assert len(siblings) == 1 or not any(s.status == Sample.Status.PENDING for s in siblings)


def _check_books(metrics: dict[str, float], accepted: int) -> None:
    drops = {k.rpartition("drop_")[2]: v for k, v in metrics.items() if "drop_" in k}
    not_kept = sum(drops.values()) - drops.get("aborted", 0) - metrics.get("rollout/dynamic_filter/kept_exhausted", 0)
    assert metrics["rollout/groups_drawn"] == accepted + not_kept + metrics["rollout/groups_given_back"]


@pytest.mark.parametrize("seeds", [range(12), pytest.param(range(12, 260), marks=pytest.mark.slow)], ids=str)
def test_every_drawn_group_is_accepted_dropped_or_given_back_whatever_the_pace(seeds: range) -> None:
    for seed in seeds:
        first, second = _play(seed, 1), _play(seed, 2)
        assert first == second, f"seed {seed}"
