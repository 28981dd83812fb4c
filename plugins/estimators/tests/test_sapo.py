from __future__ import annotations

import math

import pytest
import torch
from slime_estimators.sapo import SAPO

from slime_core import EstimatorBase, LossInputs
from slime_core.config import Args

ARGS = Args(eps_clip=0.2, eps_clip_high=0.2, eps_clip_c=None, plugins={})
RATIOS = [1.0, 1.5, 0.5, 3.0, 0.1, 1.0]
ADVANTAGES = [1.0, 1.0, -0.5, -2.0, 2.0, 0.0]


def inputs(ratios: list[float], advantages: list[float]) -> LossInputs:
    old = torch.linspace(-3, -0.5, len(ratios), dtype=torch.float64)
    return LossInputs(
        log_probs=(old + torch.tensor(ratios, dtype=torch.float64).log()).requires_grad_(),
        old_log_probs=old,
        advantages=torch.tensor(advantages, dtype=torch.float64),
        loss_mask=torch.ones(len(ratios), dtype=torch.float64),
        sample_lengths=[len(ratios)],
    )


def by_definition(ratio: float, advantage: float, positive: float, negative: float) -> tuple[float, float]:
    """Loss and its derivative by log p, from the paper's equations 5 to 7."""
    tau = positive if advantage > 0 else negative
    p = 1 / (1 + math.exp(-tau * (ratio - 1)))
    return -4 / tau * p * advantage, -4 * p * (1 - p) * ratio * advantage


@pytest.mark.parametrize(("positive", "negative"), [(1.0, 1.05), (2.0, 0.5)])
def test_loss_and_gradient_are_the_papers(positive: float, negative: float) -> None:
    args = ARGS.model_copy(update={"plugins": {"sapo": {"tau_positive": positive, "tau_negative": negative}}})
    batch = inputs(RATIOS, ADVANTAGES)
    outputs = SAPO(args).policy_loss(args, batch)
    (gradient,) = torch.autograd.grad(outputs.loss.sum(), batch.log_probs)
    expected = [by_definition(r, a, positive, negative) for r, a in zip(RATIOS, ADVANTAGES)]
    assert outputs.loss.tolist() == pytest.approx([loss for loss, _ in expected], abs=1e-14)
    assert gradient.tolist() == pytest.approx([slope for _, slope in expected], abs=1e-14)
    weights = [slope / (-r * a) if a else 1.0 for (_, slope), r, a in zip(expected, RATIOS, ADVANTAGES)]
    assert outputs.metrics["pg_clipfrac"].tolist() == pytest.approx([1 - w for w in weights], abs=1e-12)


def test_stale_samples_keep_teaching_where_a_clip_stops_and_do_not_run_away() -> None:
    """Fifty steps on one batch of a bandit: PPO stops at its clip, SAPO goes on, with a vanishing gradient."""
    old = torch.tensor([0.2, 0.8], dtype=torch.float64).log()
    ends = {}
    for name, estimator in {"ppo": EstimatorBase(ARGS), "sapo": SAPO(ARGS)}.items():
        logits = old.clone().requires_grad_()
        for _ in range(50):
            batch = inputs([1.0, 1.0], [1.0, -1.0])
            batch.old_log_probs, batch.log_probs = old, torch.log_softmax(logits, -1)
            loss = (old.exp() * estimator.policy_loss(ARGS, batch).loss).sum()
            (gradient,) = torch.autograd.grad(loss, logits)
            logits = (logits - 0.5 * gradient).detach().requires_grad_()
        ends[name] = torch.softmax(logits, -1)[0].item() / 0.2
    assert 1.8 <= ends["ppo"] < 2
    assert 3 < ends["sapo"] < 5
    far = inputs([30.0], [1.0])
    (gradient,) = torch.autograd.grad(SAPO(ARGS).policy_loss(ARGS, far).loss.sum(), far.log_probs)
    assert abs(gradient.item()) < 1e-9
