from __future__ import annotations

import numpy as np
import pytest
from slime_estimators.remax import ReMax

from slime_core import RewardInputs
from slime_core.config import Args

ARGS = Args(eps_clip=0.2)


def test_rewards_minus_baselines() -> None:
    rng = np.random.default_rng(0)
    rewards, baselines = rng.normal(size=9), rng.normal(size=9)
    inputs = RewardInputs(rewards.tolist(), [0] * 9, list(range(9)), [5] * 9, [False] * 9, baselines=baselines.tolist())
    assert ReMax(ARGS).shape_rewards(ARGS, inputs) == pytest.approx((rewards - baselines).tolist(), abs=1e-12)


def test_it_asks_for_the_greedy_baseline() -> None:
    assert ReMax.needs_greedy_baseline
    assert not ReMax.compares_group
