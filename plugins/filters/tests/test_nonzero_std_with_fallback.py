from __future__ import annotations

import pytest
from slime_filters.nonzero_std_with_fallback import dynamic_filter

from slime_core import FilterDecision, Sample
from slime_core.config import Args


def decide(*rewards: object, reward_key: str | None = None) -> FilterDecision:
    args = Args(reward_key=reward_key)
    return dynamic_filter(args, [Sample(reward=reward) for reward in rewards])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [((0.0, 0.0), "zero_std_0.0"), ((1, 1, 1), "zero_std_1.0"), ((None,), "no_reward"), ((), "no_reward")],
)
def test_a_dropped_group_may_stay_when_there_are_too_few(rewards: tuple[object, ...], reason: str) -> None:
    assert decide(*rewards) == FilterDecision(keep=False, reason=reason, keep_when_insufficient=True)


def test_a_kept_group_needs_no_fallback() -> None:
    assert decide(0.0, 1.0) == decide(0.5) == FilterDecision(keep=True)
    assert decide({"a": 1.0, "b": 0.0}, {"a": 1.0, "b": 1.0}, reward_key="b").keep
