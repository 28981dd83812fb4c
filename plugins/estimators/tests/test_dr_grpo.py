from __future__ import annotations

import numpy as np
import pytest
from slime_estimators.dr_grpo import DrGRPO

from slime_core import RewardInputs
from slime_core.config import Args

ARGS = Args(**DrGRPO.defaults, rewards_normalization=True, eps_clip=0.2)


def test_uneven_groups_against_numpy() -> None:
    rng = np.random.default_rng(7)
    rewards, groups = rng.normal(size=23), rng.integers(0, 5, size=23)
    inputs = RewardInputs(rewards.tolist(), groups.tolist(), list(range(23)), [5] * 23, [False] * 23)
    expected = [r - rewards[groups == g].mean() for r, g in zip(rewards, groups)]
    assert DrGRPO(ARGS).shape_rewards(ARGS, inputs) == pytest.approx(expected, abs=1e-12)


def test_it_cannot_do_with_the_deviation() -> None:
    assert DrGRPO.requires == {"grpo_std_normalization": False}
