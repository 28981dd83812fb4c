from __future__ import annotations

import pytest
import torch
from slime_corrections.truncated import icepop_weight, truncated_weight

from slime_core.ops.ratios import importance_ratio, ratio_from_kl, sequence_kl


def test_sequence_kl_golden() -> None:
    current = torch.tensor([-0.5, -1.0, -0.2, -1.0, -2.0])
    old = torch.tensor([-0.6, -1.2, -0.1, -1.5, -1.0])
    mask = torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0])
    found = sequence_kl(current, old, mask, [3, 2])
    torch.testing.assert_close(found, torch.tensor([-0.15, -0.15, -0.15, 0.25, 0.25]))


def test_sequence_kl_is_differentiable_through_the_whole_sequence() -> None:
    current = torch.randn(5, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    old = torch.zeros(5, dtype=torch.float64)
    mask = torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: ratio_from_kl(sequence_kl(x, old, mask, [3, 2])), (current,))
    grad = torch.autograd.grad(sequence_kl(current, old, mask, [3, 2])[0], current)[0]
    assert grad.tolist() == [-0.5, -0.5, 0.0, 0.0, 0.0]


def test_an_absurd_ratio_stays_finite_with_finite_gradient() -> None:
    kl = torch.tensor([-1000.0, 1000.0], requires_grad=True)
    ratio = ratio_from_kl(kl)
    ratio.sum().backward()
    assert torch.isfinite(ratio).all()
    assert kl.grad is not None
    assert torch.isfinite(kl.grad).all()


def test_correction_weights() -> None:
    train = torch.log(torch.tensor([0.1, 0.5, 0.9])).requires_grad_()
    rollout = torch.log(torch.tensor([0.2, 0.5, 0.3]))
    importance = importance_ratio(train, rollout)
    assert not importance.requires_grad
    assert importance.tolist() == pytest.approx([0.5, 1.0, 3.0])
    weight, clipped = truncated_weight(importance, 0.0, 2.0)
    assert weight.tolist() == pytest.approx([0.5, 1.0, 2.0])
    assert clipped.tolist() == [0.0, 0.0, 1.0]
    weight, dropped = icepop_weight(importance, 0.6, 2.0)
    assert weight.tolist() == pytest.approx([0.0, 1.0, 0.0])
    assert dropped.tolist() == [1.0, 0.0, 1.0]
