from __future__ import annotations

import pytest
from slime_filters.nonzero_std import dynamic_filter

from slime_core import Sample
from slime_core.config import Args


def decide(*rewards: object, reward_key: str | None = None):
    args = Args(reward_key=reward_key)
    return dynamic_filter(args, [Sample(reward=reward) for reward in rewards])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [((0.0, 0.0), "zero_std_0.0"), ((1, 1, 1), "zero_std_1.0"), ((0.26, 0.26), "zero_std_0.3"), ((None,), "no_reward")],
)
def test_reasons(rewards: tuple[object, ...], reason: str) -> None:
    assert decide(*rewards).reason == reason


def test_the_threshold_is_on_the_unbiased_deviation() -> None:
    # [0, d]: the unbiased deviation is d / sqrt(2)
    assert not decide(0.0, 1.41e-6)
    assert decide(0.0, 1.42e-6)
