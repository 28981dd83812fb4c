from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from slime_estimators.dapo import DAPO

from slime_core import RewardInputs
from slime_core.config import Args
from slime_core.errors import ConfigError


def make_args(limit: int | None = 20, **options: Any) -> Args:
    return Args(
        rollout_max_response_len=limit, rewards_normalization=True, grpo_std_normalization=True,
        plugins={"dapo": options}, eps_clip=0.2,
    )  # fmt: skip


@pytest.mark.parametrize(("length", "expected"), [(1, 0), (15, 0), (16, -0.2), (18, -0.6), (20, -1), (25, -1)])
def test_overlong_penalty_is_the_papers_ramp(length: int, expected: float) -> None:
    assert DAPO(make_args(overlong_buffer_len=5)).overlong(length) == pytest.approx(expected)


def test_the_buffer_is_a_fifth_of_the_limit() -> None:
    assert DAPO(make_args(20480)).buffer == 4096  # the paper's numbers
    assert DAPO(make_args(3)).buffer == 1


def test_rewards_are_shaped_before_the_group_statistics() -> None:
    args = make_args(overlong_buffer_len=5, overlong_penalty=2.0)
    inputs = RewardInputs([1.0, 1.0, 0.0], [0] * 3, [0, 1, 2], [3, 20, 18], [False, True, False])
    shaped = np.array([1.0, -1.0, -1.2])
    expected = (shaped - shaped.mean()) / (shaped.std(ddof=1) + 1e-6)
    assert DAPO(args).shape_rewards(args, inputs) == pytest.approx(expected.tolist(), abs=1e-12)
    assert inputs.rewards == [1.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("limit", "options", "complaint"),
    [
        (None, {}, "needs --rollout-max-response-len"),
        (10, {"overlong_buffer_len": 11}, "11 must not exceed --rollout-max-response-len 10"),
        (10, {"overlong_buffer_len": 0}, "overlong_buffer_len"),
        (10, {"overlong_penalty": -1}, "overlong_penalty"),
    ],
)
def test_options_that_do_not_fit(limit: int | None, options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        DAPO(make_args(limit, **options))
