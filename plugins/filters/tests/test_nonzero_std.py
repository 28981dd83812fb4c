from __future__ import annotations

import pytest
from slime_filters.nonzero_std import dynamic_filter

from slime_core import FilterDecision, Sample, resolve
from slime_core.config import Args
from slime_core.errors import DataError


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
        dynamic_filter(Args(plugins={"nonzero_std": {"of": "fromat"}}), group)
    assert not dynamic_filter(Args(plugins={"nonzero_std": {"of": "components"}}), [Sample(reward=1.0)] * 2)
