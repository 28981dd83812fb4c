from __future__ import annotations

import math
import statistics
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime_core.ops.masking import (
    deviation,
    expand_to_tokens,
    group_members,
    group_normalize,
    l2_norm,
    masked,
    masked_whiten,
    per_rollout_weights,
    per_token_weights,
    segment_means,
    segment_sums,
    weighted_sum,
)
from tests.toy_trainer import Ranks


def test_masked_entries_never_reach_the_result() -> None:
    values = torch.tensor([1.0, math.nan, 3.0, math.inf], requires_grad=True)
    mask = torch.tensor([1.0, 0.0, 1.0, 0.0])
    mean = weighted_sum(values, mask / 2)
    mean.backward()
    assert mean.item() == 2.0
    assert values.grad is not None
    assert values.grad.tolist() == [0.5, 0.0, 0.5, 0.0]
    assert masked(values.detach(), mask).tolist() == [1.0, 0.0, 3.0, 0.0]


def test_whitening_uses_the_unbiased_variance_of_the_unmasked() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(50, generator=generator) * 3 + 1e4
    mask = (torch.rand(50, generator=generator) < 0.6).float()
    chosen = values[mask.bool()].double()
    expected = (chosen - chosen.mean()) / torch.sqrt(chosen.var(unbiased=True) + 1e-8)
    found = masked_whiten(values, mask)
    torch.testing.assert_close(found[mask.bool()].double(), expected, rtol=1e-5, atol=1e-5)
    assert found[mask == 0].abs().max() == 0


@pytest.mark.parametrize("size", [1_000_000, 20_000_000, pytest.param(500_000_000, marks=pytest.mark.slow)])
def test_a_large_reduction_in_float32_is_that_in_float64(size: int) -> None:
    """The norm of a flat buffer, and the sum over one very long sample."""
    piece = torch.randn(1_000_000, generator=torch.Generator().manual_seed(0)).mul_(1e-3)
    values = piece.repeat(size // len(piece))
    expected = math.sqrt(float(piece.double().square().sum()) * (size // len(piece)))
    assert float(l2_norm([values])) == pytest.approx(expected, rel=1e-5)
    values = values[:100_000_000].abs_()
    expected = float(piece.double().abs().sum()) * (len(values) // len(piece))
    assert float(segment_sums(values, [len(values)])) == pytest.approx(expected, rel=1e-5)


def test_the_norm_is_that_of_all_elements_in_any_dtype_and_shape() -> None:
    parts = [torch.randn(3, 5000), torch.randn(()), torch.zeros(0), torch.randn(70, 90).T, torch.randn(4097).bfloat16()]
    expected = torch.cat([part.double().flatten() for part in parts]).norm()
    torch.testing.assert_close(l2_norm(parts), expected, rtol=1e-6, atol=0)
    assert l2_norm(part.double() for part in parts).item() == pytest.approx(expected.item(), rel=1e-15)
    assert l2_norm([]).item() == 0.0


def test_whitening_over_ranks_equals_whitening_at_once() -> None:
    generator = torch.Generator().manual_seed(1)
    parts = [torch.randn(n, generator=generator) for n in (7, 3, 12)]
    masks = [(torch.rand(len(p), generator=generator) < 0.7).float() for p in parts]
    masks[1][:] = 0  # A rank may have nothing unmasked.
    ranks = Ranks(3)

    def whiten(rank: int) -> torch.Tensor:
        return masked_whiten(parts[rank], masks[rank], lambda tensor: ranks.sum(rank, tensor))

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(whiten, range(3)))
    torch.testing.assert_close(torch.cat(found), masked_whiten(torch.cat(parts), torch.cat(masks)))


def test_segments() -> None:
    values = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0], requires_grad=True)
    mask = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0])
    assert segment_sums(values, [2, 0, 3]).tolist() == [3.0, 0.0, 12.0]
    means = segment_means(values, mask, [2, 0, 3])
    assert means.tolist() == [1.0, 0.0, 3.5]
    assert expand_to_tokens(means, [2, 0, 3]).tolist() == [1.0, 1.0, 3.5, 3.5, 3.5]
    means.sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [1.0, 0.0, 0.5, 0.5, 0.0]
    assert segment_sums(torch.zeros(0), []).shape == (0,)


def test_reducers_golden() -> None:
    """THUDM/slime's fixture: x = 1..9, three samples of three tokens: the sum of sample means is 15."""
    values = torch.arange(1.0, 10.0)
    mask = torch.ones(9)
    per_rollout = weighted_sum(values, per_rollout_weights(mask, [3, 3, 3], [3, 3, 3], 1))
    assert per_rollout.item() == pytest.approx(15)
    # Three siblings of one rollout (denominator 9) and a rollout of its own: 45 / 9 + 33 / 3 = 16.
    values = torch.arange(1.0, 13.0)
    weights = per_rollout_weights(torch.ones(12), [3, 3, 3, 3], [9, 9, 9, 3], 1)
    assert weighted_sum(values, weights).item() == pytest.approx(16)
    assert weighted_sum(values, per_token_weights(torch.ones(12), 12)).item() == pytest.approx(6.5)
    # Two rollouts: the mean over rollouts of each one's token mean.
    assert weighted_sum(values, weights / 2).item() == pytest.approx(8.0)


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


@pytest.mark.parametrize("reward", [0.1, 89.45009911124609, 970675192.3090398, 957656003259669.8])
def test_equal_rewards_have_no_advantage(reward: float) -> None:
    """Their sum, divided by their number, is not always the reward itself."""
    for size in range(2, 17):
        assert group_normalize([reward] * size, [0] * size, std=True) == [0.0] * size
        siblings = group_normalize([reward] * size, [0] * size, True, rollout_ids=[0] * (size - 1) + [1])
        assert siblings == [0.0] * size


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
