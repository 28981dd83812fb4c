"""Ages of samples and groups, what the policies make of them, and the histogram."""

from __future__ import annotations

from typing import Any

import pytest

from slime_core.config import Args
from slime_core.rollout import staleness
from slime_core.rollout.staleness import Verdict
from slime_core.sample import Sample, SampleStatus


def _sample(*versions: int, **changes: Any) -> Sample:
    n = len(versions)
    base: dict[str, Any] = {
        "group_index": 0, "tokens": [1] * (n + 1), "response_length": n, "status": SampleStatus.COMPLETED,
        "loss_mask": [int(v >= 0) for v in versions], "rollout_log_probs": [-1.0] * n,
        "token_weight_versions": list(versions),
    }  # fmt: skip
    return Sample(**{**base, **changes})


def _args(limit: int | None, policy: str = "recycle", retries: int = 2) -> Args:
    return Args(max_staleness=limit, staleness_policy=policy, staleness_max_retries=retries)


@pytest.mark.parametrize(
    ("sample", "age"),
    [
        (_sample(7, 5, 6), 3),
        (_sample(7, -1, 8), 1),  # what no policy sampled has no age
        (_sample(5, 7, loss_mask=[0, 1]), 1),  # nor has what is not trained on
        (_sample(5, 7, loss_mask=None), 3),
        (_sample(5, remove_sample=True), None),
        (_sample(5, status=SampleStatus.FAILED), None),
        (_sample(-1), None),
        (_sample(0, 0, token_weight_versions=[], weight_versions=["6", "7"]), 2),
        (_sample(0, 0, token_weight_versions=[], weight_versions=["default"]), 4),
        (_sample(0, 0, token_weight_versions=[]), 4),
    ],
)
def test_a_sample_is_as_old_as_its_oldest_trained_token(sample: Sample, age: int | None) -> None:
    assert staleness.sample_age(sample, version=8, unknown=4) == age


def judge(args: Any, group: list[Sample], version: int) -> Verdict:
    return staleness.judge(args, staleness.version_span(group, unknown=0), staleness.retries(group), version)


@pytest.mark.parametrize(
    ("limit", "policy", "retries", "verdict"),
    [
        (None, "drop", 0, Verdict.FRESH),
        (3, "drop", 0, Verdict.FRESH),
        (2, "drop", 0, Verdict.DROP),
        (2, "recycle", 0, Verdict.RECYCLE),
        (2, "recycle", 1, Verdict.RECYCLE),
        (2, "recycle", 2, Verdict.DROP),
        (2, "mask", 0, Verdict.MASK),
        (0, "mask", 0, Verdict.MASK),
    ],
)
def test_verdicts(limit: int | None, policy: str, retries: int, verdict: Verdict) -> None:
    group = [_sample(5, 6), _sample(8)]
    for _ in range(retries):
        staleness.recycle([Sample(metadata=group[0].metadata)])
    assert judge(_args(limit, policy), group, 8) is verdict


def test_masking_takes_old_tokens_and_removes_samples_without_young_ones() -> None:
    group = [
        _sample(5, -1, 8, 7),
        _sample(5, 6),
        _sample(8, 8, loss_mask=None),
        _sample(0, 0, token_weight_versions=[], weight_versions=["5"], loss_mask=None),
    ]
    assert staleness.mask_old_tokens(group, 8, limit=1, unknown=0) == 5
    assert [s.loss_mask for s in group] == [[0, 0, 1, 1], [0, 0], None, [0, 0]]
    assert [s.remove_sample for s in group] == [False, True, False, True]


def test_the_histogram_has_no_gaps_and_an_end() -> None:
    groups = [([_sample(8), _sample(6)], 0), ([_sample(8, 6), _sample(-1)], 0)]
    assert staleness.staleness_metrics(groups, 8) == {
        "rollout/staleness/mean": pytest.approx(4 / 3),
        "rollout/staleness/max": 2.0,
        "rollout/staleness/hist_0": 1.0,
        "rollout/staleness/hist_1": 0.0,
        "rollout/staleness/hist_2": 2.0,
    }
    assert staleness.histogram([100])["rollout/staleness/hist_8_or_more"] == 1.0
    assert staleness.staleness_metrics([([_sample(-1)], 0)], 8) == {}
