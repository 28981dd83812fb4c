from __future__ import annotations

import pytest
import torch
from slime_estimators.gspo import GSPO

from slime_core import LossInputs
from slime_core.config import Args

ARGS = Args(eps_clip=0.2, eps_clip_high=0.28, eps_clip_c=None)


def inputs(new: list[float], advantages: list[float]) -> LossInputs:
    return LossInputs(
        log_probs=torch.tensor(new, dtype=torch.float64, requires_grad=True),
        old_log_probs=torch.tensor([-0.6, -1.2, -0.1, -1.5, -1.0], dtype=torch.float64),
        advantages=torch.tensor(advantages, dtype=torch.float64),
        loss_mask=torch.tensor([1, 1, 0, 1, 1], dtype=torch.float64),
        sample_lengths=[3, 2],
    )


def test_golden_ratio_is_one_number_per_response() -> None:
    # THUDM/slime's golden numbers: mean old - new is -0.15 and 0.25 over the unmasked tokens.
    outputs = GSPO(ARGS).policy_loss(ARGS, inputs([-0.5, -1.0, -0.2, -1.0, -2.0], [1.0] * 5))
    assert outputs.metrics["ppo_kl"].tolist() == pytest.approx([-0.15] * 3 + [0.25] * 2)
    ratios = [1.161834242728283] * 3 + [0.7788007830714049] * 2  # exp(0.15), exp(-0.25)
    assert outputs.loss.tolist() == pytest.approx([-r for r in ratios])


def test_the_clip_takes_the_whole_response() -> None:
    outputs = GSPO(ARGS).policy_loss(ARGS, inputs([-0.1, -0.7, -0.1, -0.5, -0.6], [1.0, 1.0, 1.0, -1.0, -1.0]))
    # Mean log-ratios 0.5 (clipped at 1.28) and 0.7 (negative advantage: not clipped).
    assert outputs.loss.tolist() == pytest.approx([-1.28] * 3 + [2.0137527074704766] * 2)
    assert outputs.metrics["pg_clipfrac"].tolist() == [1, 1, 1, 0, 0]


def test_the_gradient_of_a_token_is_its_share_of_the_sequence() -> None:
    batch = inputs([-0.5, -1.0, -0.2, -1.0, -2.0], [2.0] * 5)
    loss = (GSPO(ARGS).policy_loss(ARGS, batch).loss * batch.loss_mask).sum()
    (gradient,) = torch.autograd.grad(loss, batch.log_probs)
    # d/dx of -A * exp(mean) summed over the two unmasked tokens: -A * ratio each; the masked token has none.
    expected = [-2 * 1.161834242728283] * 2 + [0.0] + [-2 * 0.7788007830714049] * 2
    assert gradient.tolist() == pytest.approx(expected)


def test_old_log_probs_of_the_whole_response_are_needed() -> None:
    assert GSPO.ratio_level == "sequence"
