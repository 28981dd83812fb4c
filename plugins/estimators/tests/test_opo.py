from __future__ import annotations

import numpy as np
import pytest
from slime_estimators.opo import OPO

from slime_core import RewardInputs
from slime_core.config import Args

ARGS = Args(eps_clip=0.2)


def shape(
    rewards: list[float], lengths: list[int], groups: list[int] | None = None, rollouts: list[int] | None = None
) -> list[float]:
    n = len(rewards)
    inputs = RewardInputs(rewards, groups or [0] * n, rollouts or list(range(n)), lengths, [False] * n)
    return OPO(ARGS).shape_rewards(ARGS, inputs)


def test_golden() -> None:
    # The baseline is (10 * 1 + 30 * 0 + 20 * 1) / 60.
    assert shape([1.0, 0.0, 1.0], [10, 30, 20]) == pytest.approx([0.5, -0.5, 0.5], abs=1e-15)


def test_uneven_groups_against_numpy() -> None:
    rng = np.random.default_rng(5)
    rewards, groups, lengths = rng.normal(size=40), rng.integers(0, 5, size=40), rng.integers(1, 200, size=40)
    expected = [r - np.average(rewards[groups == g], weights=lengths[groups == g]) for r, g in zip(rewards, groups)]
    assert shape(rewards.tolist(), lengths.tolist(), groups.tolist()) == pytest.approx(expected, abs=1e-12)


def test_groups_of_one_equal_rewards_and_responses_without_tokens() -> None:
    assert shape([3.0, 1e15, 1e15, 1e15], [5, 1, 3, 7], [0, 1, 1, 1]) == [0.0] * 4
    assert shape([1.0, 0.0], [0, 0]) == [0.5, -0.5]
    assert shape([1.0, 0.0, 0.0], [10, 0, 10]) == [0.5, -0.5, -0.5]


def test_siblings_are_one_member_of_their_mean_length() -> None:
    assert shape([1.0, 1.0, 0.0], [20, 40, 30], rollouts=[7, 7, 8]) == pytest.approx([0.5, 0.5, -0.5])


def test_the_gradient_varies_less_than_with_the_plain_mean() -> None:
    """Answers of 1 or 16 fair coin flips that pay 0.3 or 1: the sum over tokens of their independent scores, times A.

    With the exact baselines of either estimator, the variance by length is l * (r - b)^2.
    """
    lengths, rewards = np.array([1.0, 16.0]), np.array([0.3, 1.0])
    baselines = {"mean": rewards.mean(), "opo": 1.0 - shape([0.3, 1.0], [1, 16])[1]}
    exact = {name: float(np.mean(lengths * (rewards - b) ** 2)) for name, b in baselines.items()}
    rng = np.random.default_rng(0)
    seen = {}
    for name, b in baselines.items():
        kind = rng.integers(0, 2, size=20_000)
        scores = [rng.choice([-1.0, 1.0], size=int(lengths[k])).sum() for k in kind]
        seen[name] = float(np.var(np.array(scores) * (rewards[kind] - b)))
    assert seen == pytest.approx(exact, rel=0.05)
    assert exact["opo"] < 0.25 * exact["mean"]
    assert all(exact["opo"] <= np.mean(lengths * (rewards - b) ** 2) + 1e-12 for b in np.linspace(0, 1.5, 50))
