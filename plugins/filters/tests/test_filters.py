"""The groups that each filter drops, with its reasons; every filter against the contract of its kind."""

from __future__ import annotations

import pytest
from slime_filters.band import dynamic_filter
from slime_filters.length import dynamic_filter as by_length
from slime_filters.nonzero_std import dynamic_filter as nonzero_std
from slime_filters.nonzero_std_with_fallback import dynamic_filter as with_fallback
from slime_testing_contracts import suites

from slime_core import FilterDecision, Sample, SampleStatus, SlimeError, resolve
from slime_core.config import Args
from slime_core.errors import DataError

EQUAL = [
    ([0.0, 0.0, 0.0], False),
    ([0.0, 1.0], True),
    ([0.0, 1e-07], False),
    ([0.5], True),
    ([None, 1.0, 0.0], True),
    ([None, None], False),
]
FILTERS = {
    "band": {
        "examples": [
            ([0.0, 0.0, 0.0], False),
            ([1.0, 1.0], False),
            ([0.0, 1.0], True),
            ([0.5], False),
            ([None, 1.0, 0.0], True),
            ([None, None], False),
            ([1.0, 0.0, 0.0, 0.0, 0.0], True),
            ([1.0, 0.0, 0.0, 0.0, 0.0, 0.0], False),
            ([1.0, 1.0, 1.0, 1.0, 0.0], True),
        ]
    },
    "length": {"examples": [([0.0, 0.0], True), ([None, None], True)]},
    "nonzero_std": {"examples": EQUAL},
    "nonzero_std_with_fallback": {"examples": EQUAL},
}


globals().update(suites("filters", "slime_filters", FILTERS, globals()))


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
    assert decide(0.0, fallback=True).keep_when_insufficient
    assert not decide(0.0).keep_when_insufficient
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


def decide_length(*lengths: int, cut: int = 0, **options: object) -> FilterDecision:
    """A group with responses of these lengths, the first `cut` of them truncated."""
    samples = [Sample(tokens=[1] * (n + 1), response_length=n, status=SampleStatus.COMPLETED) for n in lengths]
    for sample in samples[:cut]:
        sample.status = SampleStatus.TRUNCATED
    return by_length(Args(plugins={"length": options}), samples)


@pytest.mark.parametrize(("cut", "reason"), [(0, None), (2, None), (3, "truncated"), (4, "truncated")])
def test_most_may_not_be_cut(cut: int, reason: str | None) -> None:
    assert decide_length(8, 8, 8, 8, cut=cut) == FilterDecision(keep=reason is None, reason=reason)


def test_the_mean_length_has_bounds() -> None:
    assert decide_length(1, 5, min_mean=3.0, max_mean=3.0)
    assert decide_length(1, 4, min_mean=3.0).reason == "too_short"
    assert decide_length(1, 6, max_mean=3.0).reason == "too_long"
    assert decide_length(10**6)
    assert decide_length(1, min_mean=3.0, fallback=True).keep_when_insufficient
    assert not decide_length(1, min_mean=3.0).keep_when_insufficient
    with pytest.raises(SlimeError, match=r"min_mean 5\.0 is above max_mean 4\.0"):
        decide_length(1, min_mean=5.0, max_mean=4.0)


def decide_nonzero_std(*rewards: object, reward_key: str | None = None):
    args = Args(reward_key=reward_key)
    return nonzero_std(args, [Sample(reward=reward) for reward in rewards])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [((0.0, 0.0), "zero_std_0.0"), ((1, 1, 1), "zero_std_1.0"), ((0.26, 0.26), "zero_std_0.3"), ((None,), "no_reward")],
)
def test_reasons_of_equal_rewards(rewards: tuple[object, ...], reason: str) -> None:
    assert decide_nonzero_std(*rewards).reason == reason


def test_the_threshold_is_on_the_unbiased_deviation() -> None:
    # [0, d]: the unbiased deviation is d / sqrt(2)
    assert not decide_nonzero_std(0.0, 1.41e-6)
    assert decide_nonzero_std(0.0, 1.42e-6)


@pytest.mark.parametrize(
    ("of", "kept"), [("reward", False), ("components", True), ("format", True), ("answer", True), ("length", False)]
)
@pytest.mark.parametrize("name", ["nonzero_std", "nonzero_std_with_fallback"])
def test_parts_that_differ_keep_a_group_whose_sums_are_equal(name: str, of: str, kept: bool) -> None:
    parts = [{"format": 1.0, "answer": 0.0, "length": 0.5}, {"format": 0.0, "answer": 1.0, "length": 0.5}]
    args = Args(plugins={name: {"of": of}})
    group = [Sample(index=i, reward=1.5, reward_components=part) for i, part in enumerate(parts)]
    decided = resolve("filters", name).obj(args, group)
    assert decided == FilterDecision(
        kept, None if kept else "zero_std_1.5", keep_when_insufficient=not kept and name != "nonzero_std"
    )


def test_a_part_that_no_reward_has_is_an_error() -> None:
    group = [Sample(index=3, reward=1.0, reward_components={"format": 1.0}), Sample(index=4, reward=1.0)]
    with pytest.raises(DataError, match=r"component 'fromat': the reward of sample 3 has the parts format "):
        nonzero_std(Args(plugins={"nonzero_std": {"of": "fromat"}}), group)
    assert not nonzero_std(Args(plugins={"nonzero_std": {"of": "components"}}), [Sample(reward=1.0)] * 2)


def decide_with_fallback(*rewards: object, reward_key: str | None = None) -> FilterDecision:
    args = Args(reward_key=reward_key)
    return with_fallback(args, [Sample(reward=reward) for reward in rewards])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [((0.0, 0.0), "zero_std_0.0"), ((1, 1, 1), "zero_std_1.0"), ((None,), "no_reward"), ((), "no_reward")],
)
def test_a_dropped_group_may_stay_when_there_are_too_few(rewards: tuple[object, ...], reason: str) -> None:
    assert decide_with_fallback(*rewards) == FilterDecision(keep=False, reason=reason, keep_when_insufficient=True)


def test_a_kept_group_needs_no_fallback() -> None:
    assert decide_with_fallback(0.0, 1.0) == decide_with_fallback(0.5) == FilterDecision(keep=True)
    assert decide_with_fallback({"a": 1.0, "b": 0.0}, {"a": 1.0, "b": 1.0}, reward_key="b").keep
