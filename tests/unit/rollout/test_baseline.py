"""The greedy baseline: made once per group, kept while the group lasts, a reason to drop the group when it fails."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from slime_data import greedy_baseline
from slime_runs.metrics import rollout_metrics

from slime_core.config import Args
from slime_core.errors import RolloutError
from slime_core.estimator import EstimatorBase
from slime_core.rollout.batch import make_batch
from slime_core.sample import Sample, SampleStatus
from tests.unit.rollout.parts import Scorer, Source, roll, rollout_args


def make_args(**changes: Any) -> Args:
    return rollout_args(**{"rollout_temperature": 0.7, "rollout_top_p": 0.9, "rollout_top_k": 5, **changes})


class Greedy(EstimatorBase):
    needs_greedy_baseline = True

    def shape_rewards(self, args: Any, inputs: Any) -> list[float]:
        return [reward - base for reward, base in zip(inputs.rewards, inputs.baselines, strict=True)]


class Generator:
    """Appends the token 9 when greedy, 5 otherwise; groups in `slow` end with the abort."""

    label = "generator 'test'"

    def __init__(self, slow: Any = (), slow_sampled: Any = (), broken: Any = ()) -> None:
        self.slow, self.slow_sampled, self.broken = set(slow), set(slow_sampled), set(broken)
        self.greedy: list[dict[str, Any]] = []
        self.sampled: list[dict[str, Any]] = []

    async def call(self, args: Any, sample: Sample, sampling_params: Any, *, evaluation=False, context=None) -> Any:
        greedy = sampling_params["temperature"] == 0
        (self.greedy if greedy else self.sampled).append({**sampling_params, "index": sample.index})
        if greedy and sample.group_index in self.broken:
            raise ValueError("no luck")
        reason = "stop"
        if sample.group_index in (self.slow if greedy else self.slow | self.slow_sampled):
            await context.engine.aborted.wait()
            reason = "abort"
        token = 9 if greedy else 5
        sample.append_response_tokens(tokens=[token], log_probs=[-1.0], meta_info={"finish_reason": {"type": reason}})
        return sample


def rollout(args: Any, source: Source, generator: Any, scorer: Any = None, keep: Any = None) -> Any:
    """0.25 for a greedy answer, the parity of the index for a sampled one."""
    scorer = scorer or Scorer(lambda sample: 0.25 if sample.tokens[-1] == 9 else float((sample.index or 0) % 2))
    return asyncio.run(roll(args, generator, source, scorer=scorer, keep=keep, greedy_baseline=True))


def test_one_greedy_response_per_group_reaches_the_estimator_and_no_trainer() -> None:
    args, generator = make_args(), Generator()
    out = rollout(args, Source(metadata={"source_name": "sums"}), generator)
    assert [len(group) for group in out.samples] == [2, 2]
    assert sorted(call["index"] for call in generator.greedy) == [-2, -1]
    keys = ("temperature", "top_p", "top_k", "max_new_tokens")
    assert [tuple(call[key] for key in keys) for call in generator.greedy] == [(0, 1, -1, 4)] * 2
    assert all(p["temperature"] == 0.7 for p in generator.sampled)
    batch = make_batch(args, 3, out.samples, Greedy(args))
    assert batch.rewards == [-0.25, 0.75, -0.25, 0.75]
    assert batch.raw_rewards == [0.0, 1.0, 0.0, 1.0]
    assert all(tokens == [1, 5] for tokens in batch.tokens)
    assert rollout_metrics(args, out.samples, 0)["rollout/greedy_baseline_reward"] == 0.25


def test_a_group_whose_baseline_fails_is_replaced_and_counted() -> None:
    out = rollout(make_args(), Source(metadata={"source_name": "sums"}), Generator(broken=[0]))
    assert [g[0].group_index for g in out.samples] == [1, 2]
    assert out.metrics["rollout/dynamic_filter/drop_greedy_baseline_failed"] == 1


def test_an_aborted_group_keeps_the_baseline_it_has_and_survives_the_checkpoint() -> None:
    args, source = make_args(over_sampling_batch_size=3, partial_rollout=True), Source(metadata={"source_name": "sums"})
    rollout(args, source, Generator(slow_sampled=[0]))
    (waiting,) = source.returned
    assert [s.status for s in waiting] == [SampleStatus.ABORTED] * 2
    source.returned = [[Sample.from_dict(json.loads(json.dumps(s.to_dict()))) for s in waiting]]
    again = Generator()
    out = rollout(make_args(partial_rollout=True), source, again)
    assert [g[0].group_index for g in out.samples] == [0, 3]
    assert [call["index"] for call in again.greedy] == [-4]  # group 3's; group 0 has its own
    assert [s.metadata[greedy_baseline.BASELINE] for s in out.samples[0]] == [0.25, 0.25]


def test_a_reward_that_compares_sees_it_as_the_groups_last_sample() -> None:
    class Ranking(Scorer):
        batched = scores_groups = True

        async def score(self, samples: list[Sample], evaluation: bool) -> list[Any]:
            assert samples[-1].tokens[-1] == 9
            return [float(rank) for rank in range(len(samples))]

    args = make_args(group_rm=True)
    out = rollout(args, Source(metadata={"source_name": "sums"}), Generator(), Ranking())
    assert make_batch(args, 3, out.samples, Greedy(args)).rewards == [-2.0, -1.0, -2.0, -1.0]


def test_siblings_of_a_fanned_out_baseline_are_averaged() -> None:
    sample = Sample(index=0)
    siblings = [Sample(reward={"acc": r}, status=SampleStatus.COMPLETED) for r in (0.0, 1.0)]
    greedy_baseline.attach([sample], siblings)
    assert greedy_baseline.baseline_reward(Args(reward_key="acc"), sample) == 0.5
    assert greedy_baseline.baseline_reward(Args(reward_key=None), sample) is None
    siblings[1].fail("reward", "down")
    greedy_baseline.attach([sample], siblings)
    assert greedy_baseline.lack([sample]) == greedy_baseline.BASELINE_FAILED


def test_a_rollout_function_without_baselines_is_told() -> None:
    scored = Sample(group_index=0, index=4, tokens=[1, 5], response_length=1, reward=1.0, status=SampleStatus.COMPLETED)
    with pytest.raises(RolloutError, match=r"sample 4 .* has no greedy baseline, which Greedy needs"):
        make_batch(make_args(), 0, [[scored]], Greedy(make_args()))
    scored.metadata[greedy_baseline.BASELINE] = "much"
    with pytest.raises(RolloutError, match=r"sample 4 .* 'much' is no finite number"):
        make_batch(make_args(), 0, [[scored]], Greedy(make_args()))
