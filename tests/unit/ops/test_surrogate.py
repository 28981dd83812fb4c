from __future__ import annotations

import pytest
import torch
from slime_estimators.cispo import cispo_surrogate

from slime_core.ops.ratios import clipped_surrogate, clipped_value_loss


def kl_of(ratios: list[float]) -> torch.Tensor:
    return -torch.log(torch.tensor(ratios))


def test_clipped_surrogate_golden() -> None:
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, 2.0])
    loss, clipfrac = clipped_surrogate(kl_of([1.5, 0.5, 1.5, 0.5, 1.0]), advantages, 0.2, 0.28)
    assert loss.tolist() == pytest.approx([-1.28, -0.5, 1.5, 0.8, -2.0])
    assert clipfrac.tolist() == [1.0, 0.0, 0.0, 1.0, 0.0]


def test_dual_clip_golden() -> None:
    loss, _ = clipped_surrogate(kl_of([5.0]), torch.tensor([-1.0]), 0.2, 0.28, 3.0)
    assert loss.tolist() == pytest.approx([3.0])
    loss, _ = clipped_surrogate(kl_of([2.0, 2.0, 0.5]), torch.tensor([2.0, -2.0, 2.0]), 0.2, 0.2, 1.5)
    assert loss.tolist() == pytest.approx([-2.4, 3.0, -1.0])


def test_gradient_at_ratio_one_is_reinforce() -> None:
    """d loss / d log p = -A where the clip is inactive, 0 where it is active."""
    log_probs = torch.log(torch.tensor([1.0, 1.5, 0.5, 1.5])).requires_grad_()
    advantages = torch.tensor([0.7, 1.0, -1.0, -1.0])
    loss, _ = clipped_surrogate(-log_probs, advantages, 0.2, 0.2)
    loss.sum().backward()
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == pytest.approx([-0.7, 0.0, 0.0, 1.5])


def test_an_exploded_ratio_leaves_gradients_finite() -> None:
    log_probs = torch.tensor([500.0, 500.0, -500.0], requires_grad=True)
    loss, _ = clipped_surrogate(-log_probs, torch.tensor([1.0, -1.0, -1.0]), 0.2, 0.2, 3.0)
    loss.sum().backward()
    assert log_probs.grad is not None
    assert torch.isfinite(log_probs.grad).all()


def test_cispo_golden() -> None:
    """Ratios 1, 1.14, 1.56, 0.4 with eps 0.2 / 0.28 clamp to 1, 1.14, 1.28, 0.8; gradient only through log p."""
    ratios = [1.0, 1.14, 1.56, 0.4]
    log_probs = torch.tensor([-0.3, -0.5, -1.0, -2.0], requires_grad=True)
    old = log_probs.detach() - torch.log(torch.tensor(ratios))
    advantages = torch.tensor([1.0, -1.0, 2.0, 0.5])
    loss, clipfrac = cispo_surrogate(old - log_probs, log_probs, advantages, 0.2, 0.28)
    clamped = torch.tensor([1.0, 1.14, 1.28, 0.8])
    torch.testing.assert_close(loss.detach(), -clamped * advantages * log_probs.detach())
    loss.sum().backward()
    torch.testing.assert_close(log_probs.grad, -clamped * advantages)
    assert clipfrac.tolist() == [0.0, 0.0, 1.0, 1.0]


def test_value_loss() -> None:
    values, old, returns = torch.tensor([1.0, 1.0, 0.05]), torch.tensor([0.0, 0.0, 0.0]), torch.tensor([1.0, 3.0, 0.0])
    loss, clipfrac = clipped_value_loss(values, old, returns, 0.2)
    assert loss.tolist() == pytest.approx([0.64, 7.84, 0.0025])
    assert clipfrac.tolist() == [1.0, 1.0, 0.0]


@pytest.mark.parametrize("eps_clip_c", [None, 3.0])
def test_gradients_against_finite_differences(eps_clip_c: float | None) -> None:
    generator = torch.Generator().manual_seed(0)
    kl = torch.randn(20, generator=generator, dtype=torch.float64, requires_grad=True)
    advantages = torch.randn(20, generator=generator, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: clipped_surrogate(x, advantages, 0.2, 0.28, eps_clip_c)[0], (kl,))


def test_value_loss_gradients_against_finite_differences() -> None:
    generator = torch.Generator().manual_seed(0)
    values, old, returns = (torch.randn(20, generator=generator, dtype=torch.float64) for _ in range(3))
    assert torch.autograd.gradcheck(lambda x: clipped_value_loss(x, old, returns, 0.2)[0], (values.requires_grad_(),))
