from __future__ import annotations

import pytest
import torch

from slime_core.errors import ConfigError
from slime_core.ops.ratios import clipped_surrogate, clipped_value_loss, kl_estimate, ratio_from_kl, sequence_kl


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


LOG_P = torch.tensor([-0.5, -1.0, -2.0, -0.1, -9.0])
LOG_REF = torch.tensor([-0.7, -0.6, -2.0, -3.1, 0.0])


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("k1", [0.2, -0.4, 0.0, 3.0, -9.0]),
        ("k2", [0.02, 0.08, 0.0, 4.5, 40.5]),
        ("k3", [0.0187308, 0.0918247, 0.0, 2.0497870, 8093.083928]),
        ("low_var_kl", [0.0187308, 0.0918247, 0.0, 2.0497870, 10.0]),
    ],
)
def test_golden_estimates_of_the_kl(kind: str, expected: list[float]) -> None:
    assert kl_estimate(LOG_P, LOG_REF, kind).tolist() == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_an_unknown_estimate_is_refused() -> None:
    with pytest.raises(ConfigError, match="'k9': allowed: k1, k2, k3, low_var_kl"):
        kl_estimate(LOG_P, LOG_REF, "k9")


@pytest.mark.parametrize("kind", ["k3", "low_var_kl"])
def test_gradients_stay_finite_far_away(kind: str) -> None:
    log_p = torch.tensor([-500.0, -1.0], requires_grad=True)
    kl_estimate(log_p, torch.zeros(2), kind, importance_log_ratio=log_p - log_p.detach()).sum().backward()
    assert log_p.grad is not None
    assert torch.isfinite(log_p.grad).all()


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_estimates_are_unbiased_over_a_small_vocabulary(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    log_p = torch.randn(7, generator=generator, dtype=torch.float64).log_softmax(0)
    log_ref = torch.randn(7, generator=generator, dtype=torch.float64).log_softmax(0)
    exact = (log_p.exp() * (log_p - log_ref)).sum()
    assert (log_p.exp() * kl_estimate(log_p, log_ref, kind)).sum().item() == pytest.approx(exact.item(), abs=1e-12)


def test_the_importance_ratio_makes_the_gradient_that_of_the_kl() -> None:
    """Tokens sampled from an old policy: E_old[ratio * k3] is the KL as a function of the new one."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(6, generator=generator, dtype=torch.float64, requires_grad=True)
    log_old = torch.randn(6, generator=generator, dtype=torch.float64).log_softmax(0)
    log_ref = torch.randn(6, generator=generator, dtype=torch.float64).log_softmax(0)
    log_p = logits.log_softmax(0)
    exact = torch.autograd.grad((log_p.exp() * (log_p - log_ref)).sum(), logits, retain_graph=True)[0]
    estimate = kl_estimate(log_p, log_ref, "k3", importance_log_ratio=log_p - log_old)
    found = torch.autograd.grad((log_old.exp() * estimate).sum(), logits)[0]
    torch.testing.assert_close(found, exact)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "low_var_kl"])
def test_gradients_against_finite_differences(kind: str, weighted: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    log_p, log_ref, log_old = (torch.randn(6, generator=generator, dtype=torch.float64) - 1 for _ in range(3))

    def run(values: torch.Tensor) -> torch.Tensor:
        return kl_estimate(values, log_ref, kind, importance_log_ratio=values - log_old if weighted else None)

    assert torch.autograd.gradcheck(run, (log_p.requires_grad_(),))


def test_the_unbiased_estimate_is_weighted_before_the_clamp() -> None:
    """k3 at r = -9 is 8093; a ratio of 1/10000 brings it below the bound of 10."""
    ratio = torch.log(torch.tensor([1e-4]))
    found = kl_estimate(torch.tensor([-9.0]), torch.zeros(1), "low_var_kl", importance_log_ratio=ratio)
    assert found.item() == pytest.approx(0.809308, abs=1e-5)


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


def test_an_exploded_ratio_leaves_gradients_finite() -> None:
    log_probs = torch.tensor([500.0, 500.0, -500.0], requires_grad=True)
    loss, _ = clipped_surrogate(-log_probs, torch.tensor([1.0, -1.0, -1.0]), 0.2, 0.2, 3.0)
    loss.sum().backward()
    assert log_probs.grad is not None
    assert torch.isfinite(log_probs.grad).all()


@pytest.mark.parametrize("eps_clip_c", [None, 3.0])
def test_gradients_of_the_surrogate_against_finite_differences(eps_clip_c: float | None) -> None:
    generator = torch.Generator().manual_seed(0)
    kl = torch.randn(20, generator=generator, dtype=torch.float64, requires_grad=True)
    advantages = torch.randn(20, generator=generator, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: clipped_surrogate(x, advantages, 0.2, 0.28, eps_clip_c)[0], (kl,))


def test_value_loss_gradients_against_finite_differences() -> None:
    generator = torch.Generator().manual_seed(0)
    values, old, returns = (torch.randn(20, generator=generator, dtype=torch.float64) for _ in range(3))
    assert torch.autograd.gradcheck(lambda x: clipped_value_loss(x, old, returns, 0.2)[0], (values.requires_grad_(),))
