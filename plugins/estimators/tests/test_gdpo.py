from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from slime_estimators.gdpo import GDPO
from slime_estimators.grpo import GRPO

from slime_core import RewardInputs
from slime_core.config import Args
from slime_core.errors import RolloutError


def make_args(**chosen: Any) -> Args:
    return Args(rewards_normalization=True, grpo_std_normalization=True, plugins={"gdpo": chosen})


def inputs(
    components: list[dict[str, float]], groups: list[int] | None = None, rollouts: list[int] | None = None
) -> RewardInputs:
    n = len(components)
    sums = [sum(parts.values()) for parts in components]
    ids = (groups or [0] * n, rollouts or list(range(n)))
    return RewardInputs(sums, *ids, [5] * n, [False] * n, components=components)


def by_definition(values: np.ndarray, groups: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Parts [n, parts] of samples that are each a rollout, from the paper's equations 4 to 6."""
    total = np.zeros(len(values))
    for part, weight in zip(values.T, weights):
        for group in set(groups.tolist()):
            chosen = groups == group
            own = part[chosen]
            if len(own) > 1:
                total[chosen] += weight * (own - own.mean()) / (own.std(ddof=1) + 1e-6)
    return (total - total.mean()) / (total.std(ddof=1) + 1e-6)


@pytest.mark.parametrize("weights", [None, {"answer": 2.0, "format": 0.25}])
def test_uneven_groups_against_numpy(weights: dict[str, float] | None) -> None:
    rng = np.random.default_rng(3)
    values, groups = rng.normal(size=(40, 2)), rng.integers(0, 6, size=40)
    components = [{"answer": a, "format": f} for a, f in values.tolist()]
    args = make_args(weights=weights)
    expected = by_definition(values, groups, np.array([*(weights or {"answer": 1.0, "format": 1.0}).values()]))
    found = GDPO(args).shape_rewards(args, inputs(components, groups.tolist()))
    assert found == pytest.approx(expected.tolist(), abs=1e-12)


def test_equal_sums_of_other_parts_get_other_advantages() -> None:
    """The paper's reason: with GRPO two of these responses are alike, here none."""
    components = [{"a": 1.0, "b": 1.0}, {"a": 0.0, "b": 2.0}, {"a": 0.0, "b": 0.0}, {"a": 0.0, "b": 3.0}]
    args = make_args()
    assert len({*GRPO(args).shape_rewards(args, inputs(components))}) == 3
    assert len({*GDPO(args).shape_rewards(args, inputs(components))}) == 4


def test_groups_of_one_equal_parts_and_no_samples() -> None:
    args = make_args()
    assert GDPO(args).shape_rewards(args, inputs([{"a": 1.0}, {"a": 3.0}, {"a": 3.0}], [0, 1, 1])) == [0.0] * 3
    assert GDPO(args).shape_rewards(args, inputs([])) == []


@pytest.mark.parametrize(
    ("components", "weights", "message"),
    [
        ([{}, {}], None, r"gdpo needs rewards with parts; these have none.*--custom-rm-path weighted_sum"),
        ([{"a": 1.0}, {"b": 1.0}], None, r"needs 'a', 'b' on every sample"),
        ([{"a": 1.0}], {"style": 1.0}, r"needs 'style' on every sample; these have a"),
    ],
)
def test_parts_that_are_not_there(
    components: list[dict[str, float]], weights: dict[str, float] | None, message: str
) -> None:
    args = make_args(weights=weights)
    with pytest.raises(RolloutError, match=message):
        GDPO(args).shape_rewards(args, inputs(components))


def test_a_small_part_rises_beside_a_large_one() -> None:
    """Two choices of an answer, one pays 10 with noise, the other 0.5: after 60 updates GRPO has learnt the first."""
    args, ends = make_args(), {}
    for estimator in (GRPO(args), GDPO(args)):
        rng, logits = np.random.default_rng(0), np.zeros(2)
        for _ in range(60):
            p = 1 / (1 + np.exp(-logits))
            chosen = (rng.random((16, 2)) < p).astype(float)
            values = chosen * [10.0, 0.5] + rng.normal(size=(16, 2)) * [3.0, 0.05]
            parts = [{"answer": a, "format": f} for a, f in values.tolist()]
            advantages = np.array(estimator.shape_rewards(args, inputs(parts)))
            logits += 0.2 * (advantages[:, None] * (chosen - p)).mean(0)
        ends[type(estimator).__name__] = 1 / (1 + np.exp(-logits))
    assert ends["GRPO"][0] > 0.8
    assert ends["GRPO"][1] < 0.65
    assert (ends["GDPO"] > 0.75).all()
