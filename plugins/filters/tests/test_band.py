from __future__ import annotations

import pytest
from slime_filters.band import dynamic_filter

from slime_core import FilterDecision, Sample, SlimeError
from slime_core.config import Args


def decide(*rewards: float | None, **options: object) -> FilterDecision:
    args = Args(reward_key=None, plugins={"band": options})
    return dynamic_filter(args, [Sample(reward=reward) for reward in rewards])


def test_reasons() -> None:
    assert decide(0.0, 0.0).reason == "below_band"
    assert decide(1.0, 1.0).reason == "above_band"
    assert decide(None).reason == "no_reward"
    assert decide(1.0, 0.0) == FilterDecision(keep=True)


@pytest.mark.parametrize(("rewards", "kept"), [((0.4, 0.6), True), ((0.3, 0.6), False), ((-1.0, 2.1), True)])
def test_the_mean_reward_may_be_what_counts(rewards: tuple[float, ...], kept: bool) -> None:
    assert decide(*rewards, of="reward", low=0.5, high=0.6).keep is kept


def test_what_passes_is_told() -> None:
    assert decide(0.5, 0.4, pass_reward=0.5)
    assert not decide(0.5, 0.4, pass_reward=0.4)


def test_fallback() -> None:
    assert decide(0.0, fallback=True).keep_when_insufficient
    assert not decide(0.0).keep_when_insufficient


def test_an_empty_band_is_refused() -> None:
    with pytest.raises(SlimeError, match=r"low 0\.9 is above high 0\.8"):
        decide(0.0, low=0.9)


def test_a_part_of_the_reward_may_be_what_counts() -> None:
    group = [Sample(reward=1.0, reward_components={"answer": right}) for right in (1.0, 0.0)]
    args = Args(reward_key=None, plugins={"band": {"component": "answer"}})
    assert dynamic_filter(args, group).keep
    assert decide(1.0, 1.0).reason == "above_band"


def test_a_dropped_group_ranks_by_the_part_that_counts() -> None:
    group = [Sample(reward=r, reward_components={"answer": a}) for r, a in ((5.0, 0.0), (0.0, 0.5), (0.0, 0.5))]
    args = Args(reward_key=None, plugins={"band": {"component": "answer"}})
    assert dynamic_filter(args, group).spread == pytest.approx((1 / 12) ** 0.5)
