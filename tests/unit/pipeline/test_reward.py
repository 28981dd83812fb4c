"""The reward stage: who scores what, and what becomes of errors."""

from __future__ import annotations

from types import SimpleNamespace

from slime_core.pipeline.reward import RewardStage
from slime_core.types import Sample

ARGS = SimpleNamespace(rm_timeout=5.0)


class Scorer:
    def __init__(self, value: float, batched: bool = False) -> None:
        self.label, self.value, self.batched, self.calls = f"reward {value}", value, batched, []
        self.scores_groups = False

    async def score(self, samples, evaluation):
        self.calls.append(len(samples))
        return [self.value] * len(samples)


def _sample(**fields) -> Sample:
    return Sample(status=Sample.Status.COMPLETED, **fields)


async def test_the_most_specific_reward_scores() -> None:
    named = {"own": Scorer(1.0), "of_the_data_set": Scorer(2.0)}
    stage = RewardStage(ARGS, Scorer(0.5), named.__getitem__)
    samples = [
        _sample(),
        _sample(metadata={"rm_type": "of_the_data_set"}),
        _sample(custom_rm_path="own", metadata={"rm_type": "of_the_data_set"}),
    ]
    await stage.score_group(samples)
    assert [s.reward for s in samples] == [0.5, 2.0, 1.0]


async def test_batched_rewards_get_one_call() -> None:
    scorer = Scorer(1.0, batched=True)
    await RewardStage(ARGS, scorer, None).score_group([_sample(), _sample(), _sample()])
    assert scorer.calls == [3]


async def test_rewarded_aborted_and_failed_samples_are_left_alone() -> None:
    scorer = Scorer(1.0)
    samples = [_sample(reward=0.25), Sample(status=Sample.Status.ABORTED), Sample(status=Sample.Status.FAILED)]
    await RewardStage(ARGS, scorer, None).score_group(samples)
    assert scorer.calls == []
    assert [s.reward for s in samples] == [0.25, None, None]


async def test_an_unknown_reward_fails_its_sample_only() -> None:
    stage = RewardStage(ARGS, Scorer(1.0), {}.__getitem__)
    samples = [_sample(), _sample(custom_rm_path="nobody")]
    await stage.score_group(samples)
    assert samples[0].reward == 1.0
    assert samples[1].status == Sample.Status.FAILED
    assert "nobody" in samples[1].metadata["failure"]["error"]


async def test_no_reward_at_all_is_said() -> None:
    sample = _sample()
    await RewardStage(ARGS, None, None).score(sample)
    assert "--custom-rm-path" in sample.metadata["failure"]["error"]
