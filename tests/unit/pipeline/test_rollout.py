"""Scheduling of groups: what is accepted, dropped, given back, and in which order."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import ClassVar

import pytest

from slime_core.errors import PluginError, RolloutError
from slime_core.pipeline.filters import FilterStage
from slime_core.pipeline.gate import GatedEngine
from slime_core.pipeline.generate import SampleRunner, sampling_seed
from slime_core.pipeline.reward import RewardStage
from slime_core.pipeline.rollout import RolloutContext, generate_rollout
from slime_core.types import FilterDecision, Sample


def _args(**changes):
    base = {
        "rollout_batch_size": 2, "over_sampling_batch_size": 2, "n_samples_per_prompt": 2, "rollout_seed": 1,
        "rm_timeout": 5.0, "rollout_timeout": 5.0, "max_consecutive_failures": 100, "sglang_server_concurrency": 64,
        "group_rm": False, "partial_rollout": False, "mask_offpolicy_in_partial_rollout": False,
        "dynamic_sampling_budget": 10, "rollout_temperature": 1.0, "rollout_top_p": 1.0, "rollout_top_k": -1,
        "rollout_max_response_len": 4, "rollout_stop": None, "rollout_stop_token_ids": None,
        "rollout_skip_special_tokens": False,
    }  # fmt: skip
    return SimpleNamespace(**{**base, **changes})


class Source:
    """Counts up groups; groups given back come first."""

    def __init__(self, size: int = 2) -> None:
        self.size, self.next, self.returned, self.draws = size, 0, [], []

    def get_samples(self, num_samples):
        self.draws.append(num_samples)
        groups = [self.returned.pop(0) for _ in range(min(num_samples, len(self.returned)))]
        while len(groups) < num_samples:
            g, self.next = self.next, self.next + 1
            groups.append(
                [Sample(group_index=g, index=g * self.size + i, tokens=[1], prompt="p") for i in range(self.size)]
            )
        return groups

    def add_samples(self, samples):
        self.returned.extend(samples)


class Engine:
    """Stands still until aborted."""

    def __init__(self) -> None:
        self.aborted = asyncio.Event()

    async def abort(self, rid=None):
        self.aborted.set()


class Generator:
    """Answers at once, or after the abort for the groups in `slow`."""

    label = "generator 'test'"

    def __init__(self, slow=(), broken=(), order=None) -> None:
        self.slow, self.broken, self.order, self.params, self.seen = set(slow), set(broken), order or {}, [], []

    async def call(self, args, sample, sampling_params, *, evaluation=False, context=None):
        self.params.append(dict(sampling_params))
        self.seen.append(sample.index)
        for _ in range(self.order.get(sample.group_index, 0)):
            await asyncio.sleep(0)
        if sample.group_index in self.broken:
            raise ValueError("no luck")
        reason = "stop"
        if sample.group_index in self.slow:
            await context.engine.aborted.wait()
            reason = "abort"
        sample.append_response_tokens(tokens=[5], log_probs=[-1.0], meta_info={"finish_reason": {"type": reason}})
        return sample


class Scorer:
    label = "reward 'test'"
    batched = False
    scores_groups = False

    def __init__(self, rewards=lambda s: float(s.index % 2)) -> None:
        self.rewards = rewards

    async def score(self, samples, evaluation):
        return [self.rewards(s) for s in samples]


def _run(args, source, generator, *, scorer=None, keep=None, engine=None):
    async def go():
        gated = GatedEngine(engine or Engine(), deterministic=True)
        runner = SampleRunner(args, gated, None, generator, RewardStage(args, scorer or Scorer(), None), None)
        filters = FilterStage(args, keep, "test")
        return await generate_rollout(args, 3, source, context=RolloutContext(runner, filters))

    return asyncio.run(go())


def test_groups_come_back_in_order_of_their_index() -> None:
    out = _run(_args(rollout_batch_size=3, over_sampling_batch_size=3), Source(), Generator(order={0: 5, 1: 1, 2: 3}))
    assert [g[0].group_index for g in out.samples] == [0, 1, 2]
    assert [s.reward for g in out.samples for s in g] == [0.0, 1.0] * 3


def test_seeds_depend_on_the_sample_alone() -> None:
    generator = Generator()
    _run(_args(), Source(), generator)
    seeds = [p["sampling_seed"] for p in generator.params]
    assert seeds == [sampling_seed(1, False, i) for i in range(4)]
    assert len(set(seeds)) == 4


def test_one_dropped_group_is_replaced_by_one() -> None:
    source = Source()
    out = _run(_args(), source, Generator(), keep=lambda args, group: group[0].group_index != 0)
    assert [g[0].group_index for g in out.samples] == [1, 2]
    assert source.draws == [2, 1]
    assert out.metrics["rollout/dynamic_filter/drop_dropped"] == 1


def test_reasons_are_counted() -> None:
    def keep(args, group):
        return FilterDecision(group[0].group_index > 1, reason=f"early_{group[0].group_index}")

    out = _run(_args(), Source(), Generator(), keep=keep)
    assert out.metrics["rollout/dynamic_filter/drop_early_0"] == 1
    assert out.metrics["rollout/groups_drawn"] == 4


def test_a_group_may_be_kept_rather_than_replaced() -> None:
    source = Source()
    out = _run(
        _args(), source, Generator(), keep=lambda a, g: FilterDecision(False, "bad", keep_when_insufficient=True)
    )
    assert (len(out.samples), source.draws) == (2, [2])


def test_a_filter_that_drops_everything_ends_with_the_budget() -> None:
    source = Source()
    with pytest.raises(RolloutError, match=r"20 groups drawn and only 0 of 2 kept.*dropped.*--dynamic-sampling-budget"):
        _run(_args(), source, Generator(), keep=lambda a, g: False)


@pytest.mark.parametrize("partial", [False, True])
def test_surplus_groups_are_given_back_and_no_prompt_is_lost(partial: bool) -> None:
    source = Source()
    args = _args(over_sampling_batch_size=4, partial_rollout=partial)
    out = _run(args, source, Generator(slow=[0, 3]))
    assert [g[0].group_index for g in out.samples] == [1, 2]
    assert [g[0].group_index for g in source.returned] == [0, 3]
    assert out.metrics["rollout/groups_given_back"] == 2
    sample = source.returned[0][0]
    assert sample.status == (Sample.Status.ABORTED if partial else Sample.Status.PENDING)
    assert sample.response_length == (1 if partial else 0)
    assert sample.metadata.get("start_rollout_id") == (3 if partial else None)
    again = _run(args, source, Generator())
    assert again.samples[0][0].group_index == 0


def test_partial_samples_go_on_and_may_be_masked() -> None:
    source = Source()
    args = _args(over_sampling_batch_size=3, partial_rollout=True, mask_offpolicy_in_partial_rollout=True)
    _run(args, source, Generator(slow=[0]))
    again = _run(args, source, Generator())
    sample = again.samples[0][0]
    assert (sample.group_index, sample.response_length, sample.loss_mask) == (0, 2, [0, 1])


def test_failed_samples_are_data() -> None:
    def rewards(sample):
        if sample.index == 0:
            raise RuntimeError("grader is down")
        return 1.0

    out = _run(_args(), Source(), Generator(), scorer=Scorer(rewards))
    first = out.samples[0][0]
    assert first.status == Sample.Status.FAILED
    assert first.metadata["failure"] == {"where": "reward 'test'", "error": "RuntimeError: grader is down"}


def test_a_group_that_failed_altogether_is_replaced() -> None:
    out = _run(_args(), Source(), Generator(broken=[1]))
    assert [g[0].group_index for g in out.samples] == [0, 2]
    assert out.metrics["rollout/dynamic_filter/drop_failed"] == 1


def test_failures_in_a_row_stop_the_run_with_the_reason() -> None:
    args = _args(max_consecutive_failures=3)
    with pytest.raises(RolloutError, match=r"3 samples in a row failed.*generator 'test': ValueError: no luck"):
        _run(args, Source(), Generator(broken=range(100)))


def test_a_reward_that_hangs_fails_its_sample() -> None:
    class Hanging(Scorer):
        async def score(self, samples, evaluation):
            if samples[0].index == 1:
                await asyncio.Event().wait()
            return await super().score(samples, evaluation)

    out = _run(_args(rm_timeout=0.05), Source(), Generator(), scorer=Hanging())
    failure = out.samples[0][1].metadata["failure"]["error"]
    assert "no answer within --rm-timeout 0.05 s" in failure


def test_concurrency_is_bounded() -> None:
    class Counting(Generator):
        now = most = 0

        async def call(self, *args, **keywords):
            self.now += 1
            self.most = max(self.most, self.now)
            await asyncio.sleep(0)
            self.now -= 1
            return await super().call(*args, **keywords)

    generator = Counting()
    _run(_args(sglang_server_concurrency=3, rollout_batch_size=5, over_sampling_batch_size=5), Source(), generator)
    assert generator.most == 3


def test_fan_out_siblings_share_a_rollout_id() -> None:
    class FanOut(Generator):
        async def call(self, args, sample, params, **keywords):
            import copy

            first = await super().call(args, sample, params, **keywords)
            return [first, copy.deepcopy(first)]

    out = _run(_args(), Source(), FanOut())
    assert [s.rollout_id for s in out.samples[0]] == [0, 0, 1, 1]
    assert {s.group_index for s in out.samples[0]} == {0}


def test_rewards_that_compare_see_the_whole_group_at_once() -> None:
    class Ranking(Scorer):
        batched = scores_groups = True
        sizes: ClassVar[list[int]] = []

        async def score(self, samples, evaluation):
            self.sizes.append(len(samples))
            return [float(rank) for rank in range(len(samples))]

    scorer = Ranking()
    out = _run(_args(), Source(), Generator(), scorer=scorer)
    assert scorer.sizes == [2, 2]
    assert [s.reward for group in out.samples for s in group] == [0.0, 1.0, 0.0, 1.0]


def test_the_same_failure_is_not_repeated_for_every_sample(caplog: pytest.LogCaptureFixture) -> None:
    def rewards(sample):
        raise RuntimeError("grader is down")

    with pytest.raises(RolloutError):
        _run(_args(max_consecutive_failures=12), Source(), Generator(), scorer=Scorer(rewards))
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert messages[1].endswith("(10 samples so far)")


@pytest.mark.parametrize("answer", ["numpy", "torch"])
def test_filters_may_answer_with_numpy_and_torch_bools(answer: str) -> None:
    import numpy
    import torch

    make = {"numpy": numpy.bool_, "torch": torch.tensor}[answer]
    out = _run(_args(), Source(), Generator(), keep=lambda args, group: make(group[0].group_index != 0))
    assert [g[0].group_index for g in out.samples] == [1, 2]


def test_a_data_source_that_raises_is_named() -> None:
    class Broken(Source):
        def get_samples(self, num_samples):
            raise OSError("disk gone")

    with pytest.raises(PluginError, match="--data-source-path: get_samples raised OSError: disk gone"):
        _run(_args(), Broken(), Generator())


def test_groups_that_only_come_back_aborted_are_counted() -> None:
    class Aborting(Generator):
        async def call(self, args, sample, params, **keywords):
            sample.status = Sample.Status.ABORTED
            return sample

    with pytest.raises(RolloutError, match="drop_aborted"):
        _run(_args(), Source(), Aborting())
