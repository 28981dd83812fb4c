"""Saved samples scored again."""

from __future__ import annotations

from pathlib import Path

import pytest
from slime_runs.inspect.reward_replay import Saved, read_saved, rescore, summary

from slime_core.config import Args
from slime_core.data.dumps import write_samples
from slime_core.errors import DataError
from slime_core.rollout.reward import RewardStage
from slime_core.sample import Sample

ARGS = Args(rm_timeout=5.0)


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
    outcomes = await rescore(RewardStage(ARGS, scorer, None), scorer, saved)
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
    outcomes = await rescore(RewardStage(ARGS, scorer, None), scorer, Saved(Path("d"), samples()), label="3")
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
