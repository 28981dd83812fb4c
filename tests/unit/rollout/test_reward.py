"""The reward stage: who scores what, and what becomes of errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime_core.config import Args
from slime_core.errors import ConfigError, PluginNotFoundError, RolloutError
from slime_core.rollout.evaluate import eval_columns
from slime_core.rollout.reward import RewardStage
from slime_core.sample import Sample

ARGS = Args(rm_timeout=5.0)


class Scorer:
    def __init__(self, value: float, batched: bool = False) -> None:
        self.label = self.spec = f"reward {value}"
        self.value, self.batched, self.calls, self.provenance = value, batched, [], {}
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
    await stage.score(samples)
    assert [s.reward for s in samples] == [0.5, 2.0, 1.0]


async def test_an_unknown_reward_fails_its_sample_only() -> None:
    stage = RewardStage(ARGS, Scorer(1.0), {}.__getitem__)
    samples = [_sample(), _sample(custom_rm_path="nobody")]
    await stage.score(samples)
    assert samples[0].reward == 1.0
    assert samples[1].status == Sample.Status.FAILED
    assert "nobody" in samples[1].metadata["failure"]["error"]


class Broken(Scorer):
    """Fails on the samples whose index it was given."""

    def __init__(self, error: Exception, indices=None, batched: bool = False) -> None:
        super().__init__(1.0, batched)
        self.error, self.indices, self.provenance = error, indices, {"sha256": "abc"}

    async def score(self, samples, evaluation):
        if self.indices is None or any(s.index in self.indices for s in samples):
            raise self.error
        return await super().score(samples, evaluation)


def _run_args(tmp_path: Path, **changes) -> Args:
    if not (tmp_path / "run").exists():
        (tmp_path / "run").mkdir()
    return Args(**{"rm_timeout": 5.0, "run_dir": str(tmp_path / "run"), "reward_key": "acc", **changes})


async def test_the_number_of_files_is_bounded_over_all_runs_of_a_directory(tmp_path: Path, monkeypatch, caplog) -> None:
    monkeypatch.setattr("slime_runs.inspect.reward_failures.MAX_SAVED", 3)
    for first in (0, 2):
        stage = RewardStage(_run_args(tmp_path), Broken(KeyError("k")), None)
        samples = [_sample(index=first + i) for i in range(4)]
        await stage.score(samples, rollout_id=0)
        assert stage.failures.num_failed == 4
        assert all(s.status == Sample.Status.FAILED for s in samples)
    assert len(list((tmp_path / "run" / "failures").iterdir())) == 3
    assert sum("further ones are not saved" in m for m in caplog.messages) == 2


async def test_a_disk_that_refuses_costs_the_file_only(tmp_path: Path, caplog) -> None:
    (tmp_path / "run").write_text("a file where the directory should be")
    sample = _sample(index=1)
    await RewardStage(_run_args(tmp_path), Broken(KeyError("k")), None).score([sample])
    assert sample.status == Sample.Status.FAILED
    assert "saved" not in sample.metadata["failure"]
    assert "cannot save the failed score" in caplog.text


def test_what_a_row_names_is_resolved_before_the_start() -> None:
    def resolve(spec):
        if spec == "nobody":
            raise PluginNotFoundError("no rewards plugin 'nobody'.")
        return Scorer(1.0)

    stage = RewardStage(ARGS, None, resolve)
    stage.require("known", "train.jsonl:1")
    with pytest.raises(ConfigError, match=r"train.jsonl:7 names the reward 'nobody': no rewards plugin 'nobody'"):
        stage.require("nobody", "train.jsonl:7")


def test_in_evaluation_a_mapping_counts_by_a_named_key_only() -> None:
    samples = [_sample(index=0, reward={"acc": 1.0, "fmt": 0.5}), _sample(index=1, reward=0.25), _sample(index=2)]
    for args in (
        Args(reward_key="acc", eval_reward_key=None),
        Args(reward_key="fmt", eval_reward_key="acc"),
    ):
        assert eval_columns(args, samples)["rewards"] == [1.0, 0.25, 0.0]
    with pytest.raises(RolloutError, match=r"sample 0 .* 'acc', 'fmt', and no setting names one: --eval-reward-key"):
        eval_columns(Args(reward_key=None, eval_reward_key=None), samples)
    with pytest.raises(RolloutError, match="'right' is not among them"):
        eval_columns(Args(reward_key=None, eval_reward_key="right"), samples)
