from __future__ import annotations

import numpy as np
import pytest
from slime_estimators.max_rl import MaxRL

from slime_core import RewardInputs
from slime_core.config import Args
from slime_core.errors import RolloutError

ARGS = Args(eps_clip=0.2)


def shape(rewards: list[float], groups: list[int], rollouts: list[int] | None = None) -> list[float]:
    n = len(rewards)
    inputs = RewardInputs(rewards, groups, rollouts or list(range(n)), [5] * n, [False] * n)
    return MaxRL(ARGS).shape_rewards(ARGS, inputs)


def test_the_group_gradient_is_the_mean_score_of_the_solved() -> None:
    """The paper's estimator is the mean of the score functions of the successes, minus the mean of all.

    With advantages averaged over n: 1/n * A_i = r_i / K - 1 / n, K the number of successes.
    """
    rewards = [1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0]
    expected = [r / 3 - 1 / 8 for r in rewards]
    assert [a / 8 for a in shape(rewards, [0] * 8)] == pytest.approx(expected, abs=1e-12)


def test_uneven_groups_against_numpy() -> None:
    rng = np.random.default_rng(5)
    rewards, groups = rng.uniform(size=30), rng.integers(0, 4, size=30)
    expected = [r / rewards[groups == g].mean() - 1 for r, g in zip(rewards, groups)]
    assert shape(rewards.tolist(), groups.tolist()) == pytest.approx(expected, abs=1e-12)


def test_nobody_solved_it_and_a_group_of_one() -> None:
    assert shape([0.0, 0.0, 1.0], [0, 0, 1]) == [0.0, 0.0, 0.0]


def test_negative_rewards_are_refused() -> None:
    with pytest.raises(RolloutError, match=r"rewards of at least 0 .* got -0.5"):
        shape([1.0, -0.5], [0, 0])
