"""The reward stage: who scores what, and what becomes of errors."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from slime_data.named_rewards import named_rewards
from slime_runs.inspect.reward_replay import Saved, read_saved, rescore, summary

from slime_core.config import Args, EvalDataset
from slime_core.data.dataset import open_rows
from slime_core.data.dumps import write_samples
from slime_core.errors import ConfigError, DataError, PluginNotFoundError, RolloutError
from slime_core.rollout.evaluate import eval_columns
from slime_core.rollout.reward import RewardStage, check_named_rewards
from slime_core.sample import Sample
from tests.unit.rollout.parts import Scorer

ARGS = Args(rm_timeout=5.0)


def paying(value: float) -> Scorer:
    return Scorer(lambda sample: value)


def _sample(**fields) -> Sample:
    return Sample(status=Sample.Status.COMPLETED, **fields)


async def test_the_most_specific_reward_scores() -> None:
    named = {"own": paying(1.0), "of_the_data_set": paying(2.0)}
    stage = RewardStage(ARGS, paying(0.5), named.__getitem__)
    samples = [
        _sample(),
        _sample(metadata={"rm_type": "of_the_data_set"}),
        _sample(custom_rm_path="own", metadata={"rm_type": "of_the_data_set"}),
    ]
    await stage.score(samples)
    assert [s.reward for s in samples] == [0.5, 2.0, 1.0]


async def test_an_unknown_reward_fails_its_sample_only() -> None:
    stage = RewardStage(ARGS, paying(1.0), {}.__getitem__)
    samples = [_sample(), _sample(custom_rm_path="nobody")]
    await stage.score(samples)
    assert samples[0].reward == 1.0
    assert samples[1].status == Sample.Status.FAILED
    assert "nobody" in samples[1].metadata["failure"]["error"]


async def test_a_disk_that_refuses_costs_the_file_only(tmp_path: Path, caplog) -> None:
    (tmp_path / "run").write_text("a file where the directory should be")
    sample = _sample(index=1)
    args = ARGS.model_copy(update={"run_dir": str(tmp_path / "run"), "reward_key": "acc"})
    await RewardStage(args, Scorer(lambda sample: {}["k"]), {}.__getitem__).score([sample])
    assert sample.status == Sample.Status.FAILED
    assert "saved" not in sample.metadata["failure"]
    assert "cannot save the failed score" in caplog.text


def test_what_a_row_names_is_resolved_before_the_start() -> None:
    def resolve(spec):
        if spec == "nobody":
            raise PluginNotFoundError("no rewards plugin 'nobody'.")
        return paying(1.0)

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


# -- rewards that rows name are found before anything starts ---------------------------------------------


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


ROWS = [
    {"input": 'says "rm_type": "prompt"', "rm_type": "elsewhere"},
    {"input": "a", "metadata": {"rm_type": "math"}},
    {"input": "b", "metadata": {"rm_type": "math"}},
    {"input": "c", "metadata": json.dumps({"rm_type": "f1", "n": 1})},
    {"input": "d", "metadata": {"custom_rm_path": "a/rm.py:f", "rm_type": ""}},
    {"input": "e", "metadata": None},
    {"input": "f", "metadata": {"rm_type": "last"}},
]
FOUND = {("rm_type", "math", 1), ("rm_type", "f1", 3), ("custom_rm_path", "a/rm.py:f", 4), ("rm_type", "last", 6)}


def test_distinct_names_with_their_first_row(tmp_path: Path) -> None:
    rows = open_rows(write(tmp_path / "a.jsonl", ROWS))
    assert set(named_rewards(rows, "metadata")) == FOUND
    assert list(named_rewards(rows, "other")) == []
    assert list(named_rewards(rows, None)) == []


class Known:
    def __init__(self, *names: str) -> None:
        self.names = names

    def require(self, spec: str, where: str) -> None:
        if spec not in self.names:
            raise ConfigError(f"{where} names {spec!r}")


def test_training_and_evaluation_rows_are_checked(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", ROWS)
    source = SimpleNamespace(rows=open_rows(path))
    args = Args()
    check_named_rewards(Known("math", "f1", "last", "a/rm.py:f"), args, source)
    with pytest.raises(ConfigError, match=r"a.jsonl:7: rm_type in the row's 'metadata' names 'last'"):
        check_named_rewards(Known("math", "f1", "a/rm.py:f"), args, source)
    dataset = EvalDataset(name="held", path=str(path))
    args.eval_datasets = [dataset]
    with pytest.raises(ConfigError, match=r"a.jsonl:4: .* 'f1'"):
        check_named_rewards(Known("math", "last", "a/rm.py:f"), args, None)
    dataset.metadata_overrides = {"rm_type": "math"}  # which wins over the rows
    check_named_rewards(Known("math", "a/rm.py:f"), args, None)
    check_named_rewards(Known(), Args(), object())


# -- saved samples scored again --------------------------------------------------------------------------


class ByLabel:
    """Scores by label; batched, it also notes the sizes of its calls."""

    label = spec = "reward 'by label'"
    provenance: dict = {}
    scores_groups = False

    def __init__(self, batched: bool = False) -> None:
        self.batched, self.sizes = batched, []

    async def start(self) -> None: ...

    async def score(self, samples, evaluation):
        self.sizes.append(len(samples))
        if any(s.label is None for s in samples):
            raise ValueError("no label")
        assert all(s.reward is None and "failure" not in s.metadata for s in samples)
        return [float(s.label) for s in samples]


def samples() -> list[Sample]:
    made = [
        Sample(index=i, group_index=i // 2, label=label, reward=1.0, status=Sample.Status.COMPLETED)
        for i, label in enumerate(["1", "0", "1", None])
    ]
    made[0].metadata["rm_type"] = "somebody else's"
    scoring, generation = (Sample(index=4 + i, group_index=2, label="1") for i in range(2))
    scoring.status = Sample.Status.TRUNCATED
    scoring.fail("reward 'old'", "no answer")
    scoring.metadata["failure"]["status"] = "truncated"
    generation.fail("generator 'x'", "broken")
    aborted = Sample(index=6, group_index=2, label="1", status=Sample.Status.ABORTED)
    return [*made, scoring, generation, aborted]


async def test_every_sample_that_can_be_scored_is() -> None:
    scorer, saved = ByLabel(), Saved(Path("d"), samples())
    before = [s.to_dict() for s in saved.samples]
    outcomes = await rescore(RewardStage(ARGS, scorer, {}.__getitem__), scorer, saved)
    assert [(o.index, o.old, o.new, o.differs) for o in outcomes] == [
        (0, 1.0, 1.0, False), (1, 1.0, 0.0, True), (2, 1.0, 1.0, False), (3, 1.0, None, True), (4, None, 1.0, True),
    ]  # fmt: skip
    assert outcomes[3].error == "ValueError: no label"
    assert [s.to_dict() for s in saved.samples] == before
    assert summary(outcomes, 7, None) == {
        "samples": 7, "scored": 4, "failed": 1, "left_out": 2, "changed": 2, "mean_old": 1.0, "mean_new": 2 / 3,
    }  # fmt: skip


async def test_batched_rewards_see_groups_and_a_label_can_be_given() -> None:
    scorer = ByLabel(batched=True)
    outcomes = await rescore(RewardStage(ARGS, scorer, {}.__getitem__), scorer, Saved(Path("d"), samples()), label="3")
    assert scorer.sizes == [2, 2, 1]
    assert [o.new for o in outcomes] == [3.0] * 5


def test_files_and_patterns(tmp_path: Path) -> None:
    for i in range(3):
        write_samples(tmp_path / f"rollout_{i}.jsonl", [Sample(index=i)])
    write_samples(tmp_path / "one.json", [Sample(index=9)])
    names = ("rollout_2.jsonl", "rollout_[01].jsonl", "one.json")
    found = read_saved([str(tmp_path / name) for name in names])
    assert [saved.samples[0].index for saved in found] == [2, 0, 1, 9]
    assert all(saved.spec is None for saved in found)
    with pytest.raises(DataError, match="no samples there"):
        read_saved([str(tmp_path / "absent*.jsonl")])
    (tmp_path / "cut.json").write_text('{"format": "slime reward failure 1", "samples": []}')
    with pytest.raises(DataError, match="not a complete record of a failed score"):
        read_saved([str(tmp_path / "cut.json")])
