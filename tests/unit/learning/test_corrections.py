"""Corrections in the policy loss, against loops in float64; what a user's function gets; invariance to splits."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from slime_corrections.mis import MismatchImportanceSampling
from slime_corrections.truncated import TruncatedImportanceSampling

from slime_core.config import Args
from slime_core.errors import ConfigError, PluginError, TrainError
from slime_core.estimator import EstimatorBase
from slime_core.learning.corrector import Corrector
from slime_core.learning.loss import PolicyLoss
from tests.batches import LossStep

torch.set_num_threads(1)

MASKS = [[1, 1, 0], [1], [0, 1, 1, 1], [0, 0], [1, 1]]
LENGTHS = [len(mask) for mask in MASKS]


def make_args(**changes: Any) -> Args:
    values: dict[str, Any] = {
        "eps_clip_high": 0.28,
        "kl_loss_type": "k3",
        "custom_tis_function_path": "mine",
        "custom_pg_loss_reducer_function_path": "constant",
        "rollout_max_response_len": 8,
        "tis_clip": 1.3,
        "tis_clip_low": 0.8,
    }
    return Args(**{**values, **changes})


def make_step(seed: int = 0) -> LossStep:
    return LossStep(MASKS, seed=seed)


def policy(args: Any, component: Any = None, **keywords: Any) -> PolicyLoss:
    corrector = None if component is None else Corrector(args, component, **keywords)
    return PolicyLoss(args, EstimatorBase(args), corrector)


def expected_loss(
    step: LossStep, args: Any, weight: Callable[[int, int], float], keep: Callable[[int, int], bool], per_token: bool
) -> torch.Tensor:
    """Sum over tokens of weight * clipped surrogate over the denominators of the original masks."""
    total = torch.zeros((), dtype=torch.float64)
    old, advantages = step.tensors.old_log_probs, step.tensors.advantages
    assert old is not None
    assert advantages is not None
    tokens, rollouts = sum(map(sum, step.masks)), len(step.masks)
    for i, mask in enumerate(step.masks):
        for t, m in enumerate(mask):
            if not m or not keep(i, t):
                continue
            ratio, a = torch.exp(step.log_probs[i][t] - old[i][t]), advantages[i][t]
            clipped = torch.clamp(ratio, 1 - args.eps_clip, 1 + args.eps_clip_high)
            token = -torch.minimum(ratio * a, clipped * a) * weight(i, t)
            total = total + token / (tokens if per_token else sum(mask) * rollouts)
    return total


def mismatch(step: LossStep, i: int, t: int) -> float:
    old, engine = step.tensors.old_log_probs, step.tensors.rollout_log_probs
    assert old is not None
    assert engine is not None
    return (old[i][t] - engine[i][t]).item()


def sequence_sum(step: LossStep, i: int) -> float:
    return sum(mismatch(step, i, t) for t, m in enumerate(step.masks[i]) if m)


def clamp(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def check(
    step: LossStep, args: Any, component: Any, weight: Any, keep: Any, per_token: bool = False
) -> dict[str, float]:
    wanted = expected_loss(step, args, weight, keep, per_token)
    metrics, found = step.run(policy(args, component), per_token=per_token)
    assert metrics["loss"] == pytest.approx(wanted.item(), abs=1e-13)
    gradients = torch.autograd.grad(wanted, step.leaves, allow_unused=True)
    for a, b in zip(found, gradients, strict=True):
        torch.testing.assert_close(a, torch.zeros_like(a) if b is None else b, rtol=1e-11, atol=1e-13)
    return metrics


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("mode", ["truncate", "clip", "mask"])
def test_mis_levels_and_modes(level: str, mode: str, per_token: bool) -> None:
    step, args = make_step(), make_args(tis_level=level, tis_mode=mode, tis_upper_bound=1.25)

    def raw(i: int, t: int) -> float:
        if level == "token":
            return math.exp(mismatch(step, i, t))
        return math.exp(sequence_sum(step, i) / (sum(step.masks[i]) if level == "geometric" else 1))

    def weight(i: int, t: int) -> float:
        w = raw(i, t)
        return {"truncate": min(w, 1.25), "clip": clamp(w, 0.8, 1.25), "mask": w}[mode]

    check(
        step, args, MismatchImportanceSampling(args), weight,
        lambda i, t: mode != "mask" or 0.8 <= raw(i, t) <= 1.25, per_token,
    )  # fmt: skip


def test_mis_rejection_has_its_own_level_and_bounds() -> None:
    step = make_step()
    args = make_args(use_rs=True, rs_level="geometric", rs_lower_bound=0.9, rs_upper_bound=1.2, tis_upper_bound=2.0)

    def keep(i: int, t: int) -> bool:
        return 0.9 <= math.exp(sequence_sum(step, i) / sum(step.masks[i])) <= 1.2

    metrics = check(
        step, args, MismatchImportanceSampling(args),
        lambda i, t: min(math.exp(mismatch(step, i, t)), 2.0), keep,
    )  # fmt: skip
    shares = [0.0 if keep(i, 0) else 1.0 for i in range(len(step.masks)) if any(step.masks[i])]
    assert metrics["mis_rejected_fraction"] == pytest.approx(sum(shares) / len(step.masks))
    assert 0 < sum(shares) < len(shares)


def test_mis_veto_and_trust_region() -> None:
    step = make_step()
    args = make_args(
        use_rs=True, rs_lower_bound=0.0, rs_upper_bound=1e9, rs_veto_threshold=0.7, rs_trust_region="max",
        rs_tr_threshold=0.04, tis_upper_bound=9.0,
    )  # fmt: skip

    def keep(i: int, t: int) -> bool:
        inner = [mismatch(step, i, k) for k, m in enumerate(step.masks[i]) if m]
        return min(inner) >= math.log(0.7) and max(r * r / 2 for r in inner) <= 0.04

    kept = [keep(i, 0) for i in range(len(step.masks)) if any(step.masks[i])]
    assert any(kept)
    assert not all(kept)
    check(step, args, MismatchImportanceSampling(args), lambda i, t: math.exp(mismatch(step, i, t)), keep)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_mis_normalises_over_the_step(level: str) -> None:
    step, args = make_step(), make_args(tis_level=level, tis_upper_bound=1.4, tis_batch_normalize=True)
    component = MismatchImportanceSampling(args)
    assert component.whole_step

    def bounded(i: int, t: int) -> float:
        return min(math.exp(mismatch(step, i, t) if level == "token" else sequence_sum(step, i)), 1.4)

    if level == "token":
        values = [bounded(i, t) for i, mask in enumerate(step.masks) for t, m in enumerate(mask) if m]
    else:
        values = [bounded(i, 0) for i, mask in enumerate(step.masks) if any(mask)]
    mean = sum(values) / len(values)
    metrics = check(step, args, component, lambda i, t: bounded(i, t) / mean, lambda i, t: True)
    # A rollout without trained tokens adds nothing to a mean over rollouts.
    assert metrics["mis_batch_norm_factor"] == pytest.approx(mean * 4 / 5)


def test_interpolation_blends_by_staleness_and_weighs_by_the_blend() -> None:
    """ratio = p / p_prox, weight = p_prox / p_engine with log p_prox = log p + (log p_engine - log p) / staleness."""
    step, args = make_step(2), make_args(proximal_policy="interpolate", tis_clip=1.1, tis_clip_low=0.0)
    staleness = [torch.tensor([float((i + t) % 4) for t in range(n)]).double() for i, n in enumerate(LENGTHS)]
    step.tensors.old_log_probs, step.tensors.staleness = None, staleness
    engine, advantages = step.tensors.rollout_log_probs, step.tensors.advantages
    assert engine is not None
    assert advantages is not None
    total = torch.zeros((), dtype=torch.float64)
    for i, mask in enumerate(step.masks):
        for t, m in enumerate(mask):
            if not m:
                continue
            current, d = step.log_probs[i][t], staleness[i][t].item()
            alpha = 1 / d if d >= 1 else 0.0
            proximal = (alpha * engine[i][t] + (1 - alpha) * current).detach()
            ratio, a = torch.exp(current - proximal), advantages[i][t]
            loss = -torch.minimum(ratio * a, torch.clamp(ratio, 0.8, 1.28) * a)
            total = total + loss * torch.exp(proximal - engine[i][t]).clamp(max=1.1) / (sum(mask) * len(step.masks))
    wanted = torch.autograd.grad(total, step.leaves, allow_unused=True)
    for splits in (None, [[1, 4], [0, 2], [3]]):
        metrics, found = step.run(policy(args, TruncatedImportanceSampling(args)), splits)
        assert metrics["loss"] == pytest.approx(total.item(), abs=1e-13)
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, torch.zeros_like(a) if b is None else b)


def test_metrics_alone_leave_the_loss_as_it_is() -> None:
    step, args = make_step(), make_args()
    plain, expected = step.run(policy(args))
    for component in (None, TruncatedImportanceSampling(args)):
        corrector = Corrector(args, component, applies=False, reports_mismatch=True)
        metrics, gradients = step.run(PolicyLoss(args, EstimatorBase(args), corrector))
        assert {name: metrics[name] for name in plain} == plain
        assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))
        assert {"mis_kl", "mis_k3_kl", "mis_ppl_ratio"} <= metrics.keys()
        assert ("tis" in metrics) == (component is not None)


# -- functions with THUDM/slime's signature ----------------------------------------------------------------


def test_a_function_gets_thudm_slimes_keywords() -> None:
    step, args = make_step(), make_args()
    seen: list[dict[str, Any]] = []

    def tis(**keywords: Any) -> Any:
        seen.append(keywords)
        pairs = zip(keywords["train_log_probs"], keywords["rollout_log_probs"], strict=True)
        weights = torch.cat([torch.exp(a - b) for a, b in pairs]).clamp(0.8, 1.3)
        masks = [m * 0 if len(m) == 1 else m for m in keywords["loss_masks"]]
        return keywords["pg_loss"] * weights, masks, {"mine": weights}

    metrics = check(step, args, tis, lambda i, t: clamp(math.exp(mismatch(step, i, t)), 0.8, 1.3), lambda i, t: i != 1)
    (call,) = seen
    assert set(call) == {
        *("args", "pg_loss", "train_log_probs", "rollout_log_probs"),
        *("loss_masks", "total_lengths", "response_lengths"),
    }
    assert call["pg_loss"].shape == (12,)
    assert call["response_lengths"] == LENGTHS
    assert call["total_lengths"] == [n + 2 for n in LENGTHS]
    assert [len(m) for m in call["loss_masks"]] == LENGTHS
    assert not any(part.requires_grad for part in call["train_log_probs"])
    assert "mine" in metrics


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda loss, masks: loss, r"path 'mine': expected \(pg_loss tensor, list .*, dict of metrics\); found Tensor"),
        (lambda loss, masks: (loss, None, {}), "found Tensor, NoneType, dict"),
        (lambda loss, masks: (loss, masks, {"m": 1.0}), r"found m \(\)"),
        (lambda loss, masks: (loss.sum(), masks, {}), r"expected \(12,\) for each result; found pg_loss \(\)"),
        (lambda loss, masks: (loss, masks[:-1], {}), r"found loss_masks \(10,\)"),
        (lambda loss, masks: (loss, masks, {"m": loss.mean()}), r"found m \(\)"),
    ],
)
def test_wrong_answers_of_a_function(answer: Any, message: str) -> None:
    def tis(pg_loss: torch.Tensor, loss_masks: list[torch.Tensor], **rest: Any) -> Any:
        return answer(pg_loss, loss_masks)

    with pytest.raises(PluginError, match=message):
        make_step().run(policy(make_args(), tis))


# -- refusals ----------------------------------------------------------------------------------------------


def test_without_the_engines_log_probs_nothing_can_be_corrected() -> None:
    step, args = make_step(), make_args()
    step.tensors.rollout_log_probs = None
    with pytest.raises(TrainError, match="rollout 8: off-policy corrections compare the trainer with the engine"):
        step.run(policy(args, TruncatedImportanceSampling(args)))
    with pytest.raises(TrainError, match="rollout 8: --proximal-policy interpolate, but the samples carry no"):
        step.run(policy(make_args(proximal_policy="interpolate")))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tis_lower_bound": 2.0, "tis_mode": "clip"}, "--tis-lower-bound 2.0 must be below --tis-upper-bound 1.3"),
        ({"use_rs": True, "rs_lower_bound": 3.0}, "--rs-lower-bound 3.0 must be below --rs-upper-bound 1.3"),
        ({"use_rs": True, "rs_trust_region": "max"}, "--rs-trust-region max needs --rs-tr-threshold"),
        ({"rs_veto_threshold": 0.1}, "--rs-veto-threshold needs --use-rs"),
    ],
)
def test_bounds_that_contradict_each_other(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MismatchImportanceSampling(make_args(**changes))
