from __future__ import annotations

import pytest
import torch

from slime_core.ops.returns import discounted_returns, gae, pad_right, reverse_scan, unpad


def serial(values: torch.Tensor, decay: float) -> torch.Tensor:
    out, carry = torch.zeros_like(values), torch.zeros_like(values[:, 0])
    for t in reversed(range(values.shape[1])):
        carry = values[:, t] + decay * carry
        out[:, t] = carry
    return out


@pytest.mark.parametrize("gamma", [0.0, 0.5, 0.99, 1.0])
@pytest.mark.parametrize("length", [1, 127, 128, 129, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_chunked_equals_serial(gamma: float, length: int, dtype: torch.dtype) -> None:
    rewards = torch.randn(3, length, dtype=dtype, generator=torch.Generator().manual_seed(length))
    tolerance = 1e-10 if dtype == torch.float64 else 1e-4
    torch.testing.assert_close(
        discounted_returns(rewards, gamma), serial(rewards, gamma), rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 64])
def test_any_chunk_length_gives_the_same(chunk: int) -> None:
    values = torch.randn(2, 23, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    torch.testing.assert_close(reverse_scan(values, 0.9, chunk), serial(values, 0.9))


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


def test_bad_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="differ in shape"):
        gae(torch.zeros(1, 2), torch.zeros(1, 3), 1.0, 1.0)
    with pytest.raises(ValueError, match="expected \\[batch, tokens\\]"):
        reverse_scan(torch.zeros(3), 1.0)
