from __future__ import annotations

import pytest
import torch
from slime_estimators.cispo import CISPO

from slime_core import LossInputs
from slime_core.config import Args

ARGS = Args(eps_clip=0.2, eps_clip_high=0.28)
RATIOS = [1.0, 1.14, 1.56, 0.4]
CLIPPED = [1.0, 1.14, 1.28, 0.8]


def inputs(advantages: list[float]) -> LossInputs:
    old = torch.tensor([-1.0, -2.0, -3.0, -0.5], dtype=torch.float64)
    return LossInputs(
        log_probs=(old + torch.tensor(RATIOS, dtype=torch.float64).log()).requires_grad_(),
        old_log_probs=old,
        advantages=torch.tensor(advantages, dtype=torch.float64),
        loss_mask=torch.ones(4),
        sample_lengths=[4],
    )


def test_golden_weights() -> None:
    batch = inputs([1.0, 1.0, -1.0, 2.0])
    outputs = CISPO(ARGS).policy_loss(ARGS, batch)
    new = batch.log_probs.tolist()
    assert outputs.loss.tolist() == pytest.approx(
        [-w * a * p for w, a, p in zip(CLIPPED, [1, 1, -1, 2], new, strict=True)]
    )
    assert outputs.metrics["pg_clipfrac"].tolist() == [0, 0, 1, 1]


def test_clipped_tokens_keep_a_bounded_gradient() -> None:
    batch = inputs([1.0, 1.0, 1.0, -1.0])
    (gradient,) = torch.autograd.grad(CISPO(ARGS).policy_loss(ARGS, batch).loss.sum(), batch.log_probs)
    assert gradient.tolist() == pytest.approx([-1.0, -1.14, -1.28, 0.8])
