from __future__ import annotations

import math

import pytest
import torch
from slime_estimators.gmpo import GMPO

from slime_core import EstimatorBase, LossInputs
from slime_core.config import Args

ARGS = Args(**{"eps_clip_c": None, **GMPO.defaults})
LENGTHS = [4, 3, 1, 2]
MASK = [1, 1, 0, 1, 1, 1, 1, 1, 0, 0]
ADVANTAGES = [1.5] * 4 + [-0.5] * 3 + [0.0] + [2.0] * 2
GAPS = [0.1, 0.9, 5.0, -0.7, -0.6, 0.3, 0.05, 0.4, 1.0, -1.0]


def inputs(gaps: list[float], advantages: list[float], mask: list[int], lengths: list[int]) -> LossInputs:
    old = torch.linspace(-3, -1, len(gaps), dtype=torch.float64)
    return LossInputs(
        log_probs=(old + torch.tensor(gaps, dtype=torch.float64)).requires_grad_(),
        old_log_probs=old,
        advantages=torch.tensor(advantages, dtype=torch.float64),
        loss_mask=torch.tensor(mask, dtype=torch.float64),
        sample_lengths=lengths,
    )


def objective(gaps: list[float], advantage: float, low: float, high: float) -> float:
    """The product form of the paper's equation 4: (prod_t |min(r A, clip(r) A)|)^(1/T) sgn(A)."""
    product = 1.0
    for gap in gaps:
        ratio = math.exp(gap)
        product *= abs(min(ratio * advantage, min(max(ratio, low), high) * advantage))
    return product ** (1 / len(gaps)) * math.copysign(1, advantage)


def test_the_loss_of_a_response_is_the_papers_product() -> None:
    batch = inputs(GAPS, ADVANTAGES, MASK, LENGTHS)
    outputs = GMPO(ARGS).policy_loss(ARGS, batch)
    low, high = 1 - ARGS.eps_clip, 1 + ARGS.eps_clip_high
    assert (low, high) == pytest.approx((math.exp(-0.4), math.exp(0.4)), abs=1e-6)
    first, second = objective([0.1, 0.9, -0.7], 1.5, low, high), objective([-0.6, 0.3, 0.05], -0.5, low, high)
    assert outputs.loss.tolist() == pytest.approx([-first] * 4 + [-second] * 3 + [0.0] + [-2.0] * 2, abs=1e-14)
    assert outputs.metrics["pg_clipfrac"].tolist()[:7] == [0, 1, 1, 0, 1, 0, 0]


def test_a_clipped_token_has_no_gradient_and_the_others_share_it() -> None:
    batch = inputs(GAPS, ADVANTAGES, MASK, LENGTHS)
    loss = (GMPO(ARGS).policy_loss(ARGS, batch).loss * batch.loss_mask).sum()
    (gradient,) = torch.autograd.grad(loss, batch.log_probs)
    low, high = 1 - ARGS.eps_clip, 1 + ARGS.eps_clip_high
    first, second = objective([0.1, 0.9, -0.7], 1.5, low, high), objective([-0.6, 0.3, 0.05], -0.5, low, high)
    expected = [-first, 0.0, 0.0, -first, 0.0, -second, -second, 0.0, 0.0, 0.0]
    assert gradient.tolist() == pytest.approx(expected, abs=1e-14)


def test_outliers_move_the_geometric_mean_less() -> None:
    """Noisy ratios of 400 responses, unclipped: the spread of GMPO's losses is below that of GRPO's means."""
    generator = torch.Generator().manual_seed(0)
    gaps = torch.randn(400, 8, generator=generator, dtype=torch.float64)
    wide = Args(eps_clip=1.0, eps_clip_high=1e9, eps_clip_c=None)
    batch = inputs(gaps.flatten().tolist(), [1.0] * 3200, [1] * 3200, [8] * 400)
    spread = {
        kind.__name__: kind(wide).policy_loss(wide, batch).loss.detach().view(400, 8).mean(1).std().item()
        for kind in (GMPO, EstimatorBase)
    }
    assert spread["GMPO"] < 0.6 * spread["EstimatorBase"]
