"""Where each estimator of the KL leads: a bandit of three arms whose optima are known in closed form."""

from __future__ import annotations

import pytest
import torch

from slime_core.ops.ratios import kl_estimate

pytestmark = pytest.mark.slow
REWARDS = torch.tensor([1.0, 0.6, 0.0], dtype=torch.float64)
REFERENCE = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
BETA = 0.5


def reverse_optimum() -> torch.Tensor:
    """argmax of E[r] - beta KL(p || ref): ref exp(r / beta), normalised."""
    return torch.softmax(REFERENCE.log() + REWARDS / BETA, 0)


def forward_optimum() -> torch.Tensor:
    """argmax of E[r] - beta KL(ref || p): beta ref / (c - r), with c such that it sums to 1."""
    low, high = 1.0 + 1e-12, 10.0
    for _ in range(200):
        middle = (low + high) / 2
        above = (BETA * REFERENCE / (middle - REWARDS)).sum() > 1
        low, high = (middle, high) if above else (low, middle)
    return BETA * REFERENCE / (low - REWARDS)


def best_arm() -> torch.Tensor:
    return torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)


def learned(kind: str, place: str) -> torch.Tensor:
    """Gradient descent on the exact expectation over the arms, on-policy at every step."""
    logits = REFERENCE.log().clone().requires_grad_()
    optimizer = torch.optim.SGD([logits], lr=2.0)
    for _ in range(3000):
        log_p = logits.log_softmax(0)
        p = log_p.detach().exp()
        advantages = REWARDS
        if place == "reward":
            advantages = REWARDS - BETA * kl_estimate(log_p.detach(), REFERENCE.log(), kind)
        loss = -(p * advantages * log_p).sum()
        if place != "reward":
            ratio = log_p - log_p.detach() if place == "loss with ratio" else None
            loss = loss + BETA * (p * kl_estimate(log_p, REFERENCE.log(), kind, importance_log_ratio=ratio)).sum()
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
    return logits.detach().softmax(0)


@pytest.mark.parametrize(
    ("kind", "place", "optimum"),
    [
        ("k1", "reward", reverse_optimum),
        ("k1", "loss with ratio", reverse_optimum),
        ("k2", "loss", reverse_optimum),
        ("k3", "loss with ratio", reverse_optimum),
        ("low_var_kl", "loss with ratio", reverse_optimum),
        ("k3", "loss", forward_optimum),
        ("low_var_kl", "loss", forward_optimum),
        ("k1", "loss", best_arm),
        ("k3", "reward", best_arm),
    ],
)
def test_where_it_leads(kind: str, place: str, optimum: object) -> None:
    assert callable(optimum)
    torch.testing.assert_close(learned(kind, place), optimum(), atol=2e-3, rtol=0)


@pytest.mark.parametrize(("kind", "place"), [("k2", "reward"), ("k2", "loss with ratio")])
def test_what_leads_to_no_optimum_of_a_kl(kind: str, place: str) -> None:
    found = learned(kind, place)
    for optimum in (reverse_optimum(), forward_optimum(), best_arm()):
        assert (found - optimum).abs().max() > 0.05
