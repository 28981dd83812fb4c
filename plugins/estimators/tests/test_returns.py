from __future__ import annotations

from itertools import product

import pytest
import torch
from slime_estimators.returns import discounted_returns, gae, masked_gae, pad_right, token_rewards, unpad

from tests.sweeps import sweep


def serial(values: torch.Tensor, decay: float) -> torch.Tensor:
    out, carry = torch.zeros_like(values), torch.zeros_like(values[:, 0])
    for t in reversed(range(values.shape[1])):
        carry = values[:, t] + decay * carry
        out[:, t] = carry
    return out


@sweep("gamma, length, dtype", product([0.0, 0.5, 0.99, 1.0], [1, 127, 128, 129, 1000], [torch.float32, torch.float64]))
def test_chunked_equals_serial(gamma: float, length: int, dtype: torch.dtype) -> None:
    rewards = torch.randn(3, length, dtype=dtype, generator=torch.Generator().manual_seed(length))
    tolerance = 1e-10 if dtype == torch.float64 else 1e-4
    torch.testing.assert_close(
        discounted_returns(rewards, gamma), serial(rewards, gamma), rtol=tolerance, atol=tolerance
    )


def test_gae_of_a_long_batch_is_that_in_float64() -> None:
    generator = torch.Generator().manual_seed(0)
    rewards, values = (torch.randn(256, 8192, generator=generator) for _ in range(2))
    found = gae(rewards, values, 0.99, 0.95)
    for narrow, wide in zip(found, gae(rewards.double(), values.double(), 0.99, 0.95)):
        torch.testing.assert_close(narrow, wide.float(), rtol=2e-7, atol=1e-7)


def test_padding_stays_zero_and_does_not_matter() -> None:
    parts = [torch.rand(n, generator=torch.Generator().manual_seed(n)) for n in (3, 200, 1)]
    returns = discounted_returns(pad_right(parts), 0.9)
    assert returns[0, 3:].abs().max() == 0
    for part, row in zip(parts, unpad(returns, [3, 200, 1]), strict=True):
        torch.testing.assert_close(row, serial(part[None], 0.9)[0])


def test_gae_golden() -> None:
    advantages, returns = gae(torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[0.1, 0.2, 0.3]]), gamma=0.9, lambd=0.8)
    torch.testing.assert_close(advantages, torch.tensor([[0.49328, 0.574, 0.7]]))
    torch.testing.assert_close(returns, torch.tensor([[0.59328, 0.774, 1.0]]))


def test_gae_limits() -> None:
    generator = torch.Generator().manual_seed(2)
    rewards = torch.rand(2, 150, generator=generator, dtype=torch.float64)
    values = torch.rand(2, 150, generator=generator, dtype=torch.float64)
    advantages, returns = gae(rewards, values, gamma=0.95, lambd=1.0)
    torch.testing.assert_close(returns, serial(rewards, 0.95))
    one_step, _ = gae(rewards, values, gamma=0.95, lambd=0.0)
    following = torch.cat([values[:, 1:], torch.zeros(2, 1, dtype=torch.float64)], dim=1)
    torch.testing.assert_close(one_step, rewards + 0.95 * following - values)
    torch.testing.assert_close(advantages, returns - values)


# -- responses with masked tokens ------------------------------------------------------------------------


def test_token_rewards_sit_on_the_last_unmasked_token() -> None:
    kl, mask = torch.tensor([0.1, 0.2, float("nan"), 0.4]), torch.tensor([1.0, 1.0, 0.0, 0.0])
    assert token_rewards(1.0, kl, mask, 0.5).tolist() == pytest.approx([-0.05, 0.9, 0.0, 0.0])
    assert token_rewards(1.0, kl, torch.zeros(4), 0.5).tolist() == [0.0] * 4


def test_masked_gae_without_masks_is_gae() -> None:
    generator = torch.Generator().manual_seed(5)
    lengths = [1, 7, 130]
    rewards, values = ([torch.randn(n, generator=generator).double() for n in lengths] for _ in range(2))
    found = masked_gae(rewards, values, [torch.ones(n) for n in lengths], 0.97, 0.9)
    expected = gae(pad_right(rewards), pad_right(values), 0.97, 0.9)
    for parts, padded in zip(found, expected, strict=True):
        for part, row in zip(parts, unpad(padded, lengths), strict=True):
            torch.testing.assert_close(part, row, rtol=1e-12, atol=1e-12)


def test_masked_gae_does_not_see_masked_tokens() -> None:
    rewards, values = torch.tensor([0.0, 0.0, 1.0]), torch.tensor([0.1, 0.2, 0.3])
    nan = float("nan")
    spread = [torch.tensor([0.0, nan, 0.0, nan, 1.0, nan]), torch.tensor([0.1, nan, 0.2, nan, 0.3, nan])]
    mask = torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0, 0.0])
    plain = masked_gae([rewards], [values], [torch.ones(3)], 0.9, 0.8)
    found = masked_gae([spread[0]], [spread[1]], [mask], 0.9, 0.8)
    for parts, expected in zip(found, plain, strict=True):
        assert parts[0][mask != 0].tolist() == expected[0].tolist()
        assert parts[0][mask == 0].tolist() == [0.0] * 3
    assert plain[0][0].tolist() == pytest.approx([0.49328, 0.574, 0.7])
    assert masked_gae([], [], [], 0.9, 0.8) == ([], [])
