from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from slime_estimators.dppo import DPPO, binary_kl, total_variation

from slime_core import EstimatorBase, LossInputs
from slime_core.config import Args

OLD = [0.001, 0.5, 0.99, 0.3, 0.9, 0.2, 0.5]
NEW = [0.003, 0.75, 0.8, 0.1, 0.97, 0.6, 0.5]
ADVANTAGES = [1.0, 1.0, -1.0, 2.0, 1.0, -1.0, 3.0]


def make_args(**chosen: Any) -> Args:
    return Args(eps_clip=0.2, eps_clip_high=0.2, eps_clip_c=None, plugins={"dppo": chosen})


def inputs(old: list[float], new: list[float], advantages: list[float]) -> LossInputs:
    return LossInputs(
        log_probs=torch.tensor(new, dtype=torch.float64).log().requires_grad_(),
        old_log_probs=torch.tensor(old, dtype=torch.float64).log(),
        advantages=torch.tensor(advantages, dtype=torch.float64),
        loss_mask=torch.ones(len(old), dtype=torch.float64),
        sample_lengths=[len(old)],
    )


def divergence(kind: str, p: float, q: float) -> float:
    return abs(p - q) if kind == "tv" else p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


@pytest.mark.parametrize(("kind", "threshold"), [("tv", None), ("kl", None), ("tv", 0.05), ("kl", 0.1)])
def test_the_mask_is_the_papers(kind: str, threshold: float | None) -> None:
    args, limit = make_args(divergence=kind, threshold=threshold), threshold or {"tv": 0.15, "kl": 0.05}[kind]
    batch = inputs(OLD, NEW, ADVANTAGES)
    outputs = DPPO(args).policy_loss(args, batch)
    (gradient,) = torch.autograd.grad(outputs.loss.sum(), batch.log_probs)
    kept = [
        divergence(kind, p, q) <= limit or not ((a > 0 and q > p) or (a < 0 and q < p))
        for p, q, a in zip(OLD, NEW, ADVANTAGES)
    ]
    expected = [-q / p * a if k else 0.0 for p, q, a, k in zip(OLD, NEW, ADVANTAGES, kept)]
    assert gradient.tolist() == pytest.approx(expected, abs=1e-12)
    assert outputs.loss.tolist() == pytest.approx(expected, abs=1e-12)
    assert outputs.metrics["pg_clipfrac"].tolist() == [not k for k in kept]
    assert {*kept} == {True, False}


def test_certain_tokens_give_numbers() -> None:
    zero = torch.zeros(3)
    old, new = torch.tensor([0.0, -0.5, 0.0]), torch.tensor([0.0, 0.0, -0.5])
    assert binary_kl(old, new).tolist() == [0.0, math.inf, 0.5]
    assert binary_kl(zero + 1e-7, zero + 1e-7).tolist() == [0.0] * 3  # above 0 by rounding
    assert total_variation(old, new).tolist() == pytest.approx([0.0, 1 - math.exp(-0.5), 1 - math.exp(-0.5)])


def test_a_rare_answer_may_grow_and_a_frequent_one_may_not_collapse() -> None:
    """Steps on one batch of a bandit whose best arm is rare: PPO stops it at 1.2 times, DPPO at 15%."""
    old = torch.tensor([0.01, 0.99], dtype=torch.float64).log()
    ends = {}
    for name, kind in {"ppo": EstimatorBase, "dppo": DPPO}.items():
        args = make_args()
        logits = old.clone().requires_grad_()
        for _ in range(200):
            batch = inputs([0.01, 0.99], [0.01, 0.99], [9.9, -0.1])
            batch.log_probs = torch.log_softmax(logits, -1)
            loss = (old.exp() * kind(args).policy_loss(args, batch).loss).sum()
            (gradient,) = torch.autograd.grad(loss, logits)
            logits = (logits - 0.2 * gradient).detach().requires_grad_()
        ends[name] = torch.softmax(logits, -1)[0].item()
    assert ends["ppo"] < 0.02
    assert 0.15 < ends["dppo"] < 0.3
