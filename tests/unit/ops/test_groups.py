from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_core.ops.masking import deviation, group_members, group_normalize


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [([1, 0, 0, 1], [0.866024, -0.866024, -0.866024, 0.866024]), ([1, 1, 1, 0], [0.499999] * 3 + [-1.499997])],
)
def test_golden(rewards: list[float], expected: list[float]) -> None:
    assert group_normalize(rewards, [0] * 4, std=True) == pytest.approx(expected, abs=1e-6)


rows = st.lists(st.tuples(st.floats(-10, 10), st.integers(0, 3)), min_size=1, max_size=20)


@given(rows, st.booleans(), st.randoms())
def test_against_the_statistics_module_in_any_order(rows: list[tuple[float, int]], std: bool, random: object) -> None:
    random.shuffle(rows)  # type: ignore[attr-defined]
    found = group_normalize([r for r, _ in rows], [g for _, g in rows], std)
    for (reward, group), value in zip(rows, found, strict=True):
        members = [r for r, g in rows if g == group]
        scale = statistics.stdev(members) + 1e-6 if std and len(members) > 1 else 1.0
        assert value == pytest.approx((reward - statistics.fmean(members)) / scale, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("large", [1e15, 1e160, 1e300])
@pytest.mark.parametrize("std", [True, False])
def test_a_large_reward_overflows_nothing_and_stays_in_its_group(large: float, std: bool) -> None:
    found = group_normalize([0, 0, 0, large, *[large] * 4, 1, 0], [0] * 4 + [1] * 4 + [2] * 2, std)
    scale = large / 2 if std else 1.0
    assert found[:4] == pytest.approx([-large / 4 / scale] * 3 + [large * 3 / 4 / scale])
    assert found[4:8] == [0.0] * 4
    assert found[8:] == group_normalize([1, 0], [0, 0], std)
    assert deviation([large, -large]) == pytest.approx(large * 2**0.5)


def test_siblings_count_once_even_with_different_rewards() -> None:
    # Rollout 0 is worth (2 + 0) / 2 = 1; the members are 1 and 0.
    found = group_normalize([2.0, 0.0, 0.0], [0, 0, 0], std=False, rollout_ids=[0, 0, 1])
    assert found == [1.5, -0.5, -0.5]


def test_members_are_rollouts_worth_the_mean_of_their_siblings() -> None:
    members = group_members([1.0, 0.0, 4.0, 2.0], [7, 7, 7, 3], [5, 5, 6, 9])
    assert members == {7: {5: 0.5, 6: 4.0}, 3: {9: 2.0}}
    assert group_members([1.0, 0.0], [7, 7]) == {7: {0: 1.0, 1: 0.0}}
    with pytest.raises(ValueError, match="2 rewards, 1 group_indices, 2 rollout_ids"):
        group_members([1.0, 0.0], [7])
