from __future__ import annotations

import numpy as np
import pytest
from slime_estimators.rloo import RLOO

from slime_core import RewardInputs
from slime_core.config import Args

ARGS = Args(eps_clip=0.2)

# From TRL 1.16.0: what `_generate_and_score_completions` of a running trainer returns for these rewards, groups of 4.
TRL_REWARDS = [1.0, 0.0, 0.0, 1.0, 0.5, 2.0, -1.0, 0.25]
TRL_RLOO = [0.66666663, -0.66666669, -0.66666669, 0.66666663, 0.08333334, 2.08333325, -1.91666675, -0.25]


def shape(rewards: list[float], groups: list[int], rollouts: list[int] | None = None) -> list[float]:
    n = len(rewards)
    inputs = RewardInputs(rewards, groups, rollouts or list(range(n)), [5] * n, [False] * n)
    return RLOO(ARGS).shape_rewards(ARGS, inputs)


def test_uneven_groups_against_numpy() -> None:
    rng = np.random.default_rng(3)
    rewards, groups = rng.normal(size=40), rng.integers(0, 6, size=40)
    expected = []
    for i in range(40):
        others = (groups == groups[i]) & (np.arange(40) != i)
        expected.append(rewards[i] - rewards[others].mean())
    assert shape(rewards.tolist(), groups.tolist()) == pytest.approx(expected, abs=1e-12)


def test_trls_numbers() -> None:
    assert shape(TRL_REWARDS, [0] * 4 + [1] * 4) == pytest.approx(TRL_RLOO, abs=1e-6)


def test_a_group_of_one_gets_nothing() -> None:
    assert shape([3.0, 1.0, 2.0], [0, 1, 1]) == [0.0, -1.0, 1.0]
