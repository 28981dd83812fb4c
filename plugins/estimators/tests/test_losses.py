"""Policy losses and their gradients by definition, in float64: CISPO, GSPO, GMPO, SAPO, DPPO and VAPO."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from slime_estimators.dppo import binary_kl, total_variation

from slime_core import LossInputs, resolve
from slime_core.config import Args


def made(name: str, chosen: dict[str, Any] | None = None, **settings: Any) -> tuple[Any, Args]:
    """Return an estimator with its own defaults and options, and its arguments."""
    found = resolve("estimators", name).obj
    values = {"eps_clip": 0.2, "eps_clip_high": 0.28, "eps_clip_c": None, "gamma": 1.0, "lambd": 1.0, "kl_coef": 0.0}
    args = Args(**values | found.defaults | settings, plugins={name: chosen or {}})
    return found(args), args


def inputs(
    gaps: Sequence[float], advantages: Sequence[float], mask: Sequence[int] | None = None,
    lengths: Sequence[int] | None = None, old: torch.Tensor | None = None, returns: Sequence[float] | None = None,
) -> LossInputs:  # fmt: skip
    """Return tokens whose new log-probs are `gaps` above the old ones."""
    n = len(gaps)
    before = torch.linspace(-3, -0.5, n, dtype=torch.float64) if old is None else old
    return LossInputs(
        (before + torch.tensor(gaps, dtype=torch.float64)).requires_grad_(), before,
        torch.tensor(advantages, dtype=torch.float64), torch.tensor(mask or [1] * n, dtype=torch.float64),
        list(lengths or [n]), returns=None if returns is None else torch.tensor(returns, dtype=torch.float64),
    )  # fmt: skip


def gradient(estimator: Any, args: Args, batch: LossInputs) -> tuple[Any, list[float]]:
    """Return the loss's outputs, and the derivative of the sum over unmasked tokens by each log-prob."""
    outputs = estimator.policy_loss(args, batch)
    (found,) = torch.autograd.grad((outputs.loss * batch.loss_mask).sum(), batch.log_probs)
    return outputs, found.tolist()


def test_cispo_bounds_the_weight_and_keeps_the_gradient() -> None:
    ratios, bounded, advantages = [1.0, 1.14, 1.56, 0.4], [1.0, 1.14, 1.28, 0.8], [1.0, 1.0, -1.0, 2.0]
    batch = inputs([math.log(r) for r in ratios], advantages)
    outputs, found = gradient(*made("cispo"), batch)
    pairs = list(zip(bounded, advantages, strict=True))
    assert found == pytest.approx([-w * a for w, a in pairs])
    assert outputs.loss.tolist() == pytest.approx([-w * a * p for (w, a), p in zip(pairs, batch.log_probs.tolist())])
    assert outputs.metrics["pg_clipfrac"].tolist() == [0, 0, 1, 1]


def test_the_ratio_of_gspo_is_one_number_per_response() -> None:
    # THUDM/slime's golden numbers: mean new - old is 0.15 and -0.25 over the unmasked tokens.
    gaps, mask = [0.1, 0.2, -0.1, 0.5, -1.0], [1, 1, 0, 1, 1]
    outputs, found = gradient(*made("gspo"), inputs(gaps, [2.0] * 5, mask, [3, 2]))
    ratios = [1.161834242728283] * 3 + [0.7788007830714049] * 2  # exp(0.15), exp(-0.25)
    assert outputs.metrics["ppo_kl"].tolist() == pytest.approx([-0.15] * 3 + [0.25] * 2)
    assert outputs.loss.tolist() == pytest.approx([-2 * r for r in ratios])
    # d/dx of -A * exp(mean) summed over the two unmasked tokens: -A * ratio each; the masked token has none.
    assert found == pytest.approx([-2 * r * m for r, m in zip(ratios, mask)])
    # Mean log-ratios 0.5 (clipped at 1.28) and 0.7 (negative advantage: not clipped).
    outputs, _ = gradient(*made("gspo"), inputs([0.5, 0.5, 0.0, 1.0, 0.4], [1.0] * 3 + [-1.0] * 2, mask, [3, 2]))
    assert outputs.loss.tolist() == pytest.approx([-1.28] * 3 + [2.0137527074704766] * 2)
    assert outputs.metrics["pg_clipfrac"].tolist() == [1, 1, 1, 0, 0]


def test_the_loss_of_gmpo_is_the_papers_product() -> None:
    """Equation 4: (prod_t |min(r A, clip(r) A)|)^(1/T) sgn(A); a clipped token has no gradient."""
    estimator, args = made("gmpo")
    low, high = 1 - args.eps_clip, 1 + args.eps_clip_high
    assert (low, high) == pytest.approx((math.exp(-0.4), math.exp(0.4)), abs=1e-6)

    def objective(gaps: list[float], advantage: float) -> float:
        ratios = [math.exp(gap) for gap in gaps]
        parts = [abs(min(r * advantage, min(max(r, low), high) * advantage)) for r in ratios]
        return math.prod(parts) ** (1 / len(gaps)) * math.copysign(1, advantage)

    batch = inputs(
        [0.1, 0.9, 5.0, -0.7, -0.6, 0.3, 0.05, 0.4, 1.0, -1.0], [1.5] * 4 + [-0.5] * 3 + [0.0] + [2.0] * 2,
        [1, 1, 0, 1, 1, 1, 1, 1, 0, 0], [4, 3, 1, 2],
    )  # fmt: skip
    outputs, found = gradient(estimator, args, batch)
    first, second = objective([0.1, 0.9, -0.7], 1.5), objective([-0.6, 0.3, 0.05], -0.5)
    assert outputs.loss.tolist() == pytest.approx([-first] * 4 + [-second] * 3 + [0.0] + [-2.0] * 2, abs=1e-14)
    assert found == pytest.approx([-first, 0.0, 0.0, -first, 0.0, -second, -second, 0.0, 0.0, 0.0], abs=1e-14)
    assert outputs.metrics["pg_clipfrac"].tolist()[:7] == [0, 1, 1, 0, 1, 0, 0]


@pytest.mark.parametrize(("positive", "negative"), [(1.0, 1.05), (2.0, 0.5)])
def test_loss_and_gradient_of_sapo_are_the_papers(positive: float, negative: float) -> None:
    """Equations 5 to 7."""
    ratios, advantages = [1.0, 1.5, 0.5, 3.0, 0.1, 1.0], [1.0, 1.0, -0.5, -2.0, 2.0, 0.0]
    losses, slopes = [], []
    for ratio, advantage in zip(ratios, advantages):
        tau = positive if advantage > 0 else negative
        p = 1 / (1 + math.exp(-tau * (ratio - 1)))
        losses.append(-4 / tau * p * advantage)
        slopes.append(-4 * p * (1 - p) * ratio * advantage)
    estimator, args = made("sapo", {"tau_positive": positive, "tau_negative": negative})
    outputs, found = gradient(estimator, args, inputs([math.log(r) for r in ratios], advantages))
    assert outputs.loss.tolist() == pytest.approx(losses, abs=1e-14)
    assert found == pytest.approx(slopes, abs=1e-14)
    weights = [slope / (-r * a) if a else 1.0 for slope, r, a in zip(slopes, ratios, advantages)]
    assert outputs.metrics["pg_clipfrac"].tolist() == pytest.approx([1 - w for w in weights], abs=1e-12)
    assert abs(gradient(estimator, args, inputs([math.log(30.0)], [1.0]))[1][0]) < 1e-9


@pytest.mark.parametrize(("kind", "threshold"), [("tv", None), ("kl", None), ("tv", 0.05), ("kl", 0.1)])
def test_the_mask_of_dppo_is_the_papers(kind: str, threshold: float | None) -> None:
    old, new = [0.001, 0.5, 0.99, 0.3, 0.9, 0.2, 0.5], [0.003, 0.75, 0.8, 0.1, 0.97, 0.6, 0.5]
    advantages, limit = [1.0, 1.0, -1.0, 2.0, 1.0, -1.0, 3.0], threshold or {"tv": 0.15, "kl": 0.05}[kind]
    gaps = [math.log(q / p) for p, q in zip(old, new)]
    batch = inputs(gaps, advantages, old=torch.tensor(old, dtype=torch.float64).log())
    outputs, found = gradient(*made("dppo", {"divergence": kind, "threshold": threshold}), batch)
    kept = []
    for p, q, a in zip(old, new, advantages):
        apart = abs(p - q) if kind == "tv" else p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
        kept.append(apart <= limit or not ((a > 0 and q > p) or (a < 0 and q < p)))
    expected = [-q / p * a if k else 0.0 for p, q, a, k in zip(old, new, advantages, kept)]
    assert found == pytest.approx(expected, abs=1e-12)
    assert outputs.loss.tolist() == pytest.approx(expected, abs=1e-12)
    assert outputs.metrics["pg_clipfrac"].tolist() == [not k for k in kept]
    assert {*kept} == {True, False}


def test_certain_tokens_have_a_divergence() -> None:
    old, new = torch.tensor([0.0, -0.5, 0.0]), torch.tensor([0.0, 0.0, -0.5])
    assert binary_kl(old, new).tolist() == [0.0, math.inf, 0.5]
    assert binary_kl(torch.full((3,), 1e-7), torch.full((3,), 1e-7)).tolist() == [0.0] * 3  # above 0 by rounding
    assert total_variation(old, new).tolist() == pytest.approx([0.0, 1 - math.exp(-0.5), 1 - math.exp(-0.5)])


@pytest.mark.parametrize("weight", [0.0, 0.1, 2.0])
def test_vapo_imitates_right_answers(weight: float) -> None:
    gaps, advantages, right = [0.1, -0.1, 0.05], [0.5, -0.5, 1.0], [1.0, 1.0, 0.0]
    batch = inputs(gaps, advantages, lengths=[2, 1], returns=right)
    outputs, _ = gradient(*made("vapo", {"positive_nll": weight}), batch)
    rows = zip(gaps, advantages, right, batch.log_probs.tolist())
    assert outputs.loss.tolist() == pytest.approx([-math.exp(g) * a - weight * r * p for g, a, r, p in rows], abs=1e-14)
