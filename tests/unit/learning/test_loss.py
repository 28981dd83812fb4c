from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from slime_commands.sft.loss import SFTLoss

from slime_core.config import Args
from slime_core.errors import PluginError
from slime_core.estimator import EstimatorBase
from slime_core.learning.loss import PolicyLoss, reduced
from slime_core.ops.ratios import kl_estimate
from tests.batches import LossStep

torch.set_num_threads(1)


def make_args(**changes: Any) -> Args:
    values = {
        "eps_clip_high": 0.28,
        "kl_loss_type": "k3",
    }
    return Args(**{**values, **changes})


MASKS = [[1, 1, 0], [1], [0, 1, 1, 1], [0, 0], [1, 1]]


def reference(problem: LossStep, args: Any, per_token: bool) -> torch.Tensor:
    """The loss written out sample by sample and token by token."""
    total = torch.zeros((), dtype=torch.float64)
    batch, tensors = problem.batch, problem.tensors
    tokens = sum(map(sum, batch.loss_masks))
    rollouts = len(set(batch.rollout_ids))
    assert tensors.advantages and tensors.old_log_probs and tensors.ref_log_probs  # noqa: PT018
    for i, mask in enumerate(batch.loss_masks):
        for t, m in enumerate(mask):
            if not m:
                continue
            ratio = torch.exp(problem.log_probs[i][t] - tensors.old_log_probs[i][t])
            advantage = tensors.advantages[i][t]
            clipped = torch.clamp(ratio, 1 - args.eps_clip, 1 + args.eps_clip_high)
            token = -torch.minimum(ratio * advantage, clipped * advantage)
            token = token - args.entropy_coef * problem.entropy[i][t]
            if args.use_kl_loss:
                r = problem.log_probs[i][t] - tensors.ref_log_probs[i][t]
                kl = torch.exp(-r) - 1 + r
                token = token + args.kl_loss_coef * (kl * ratio if args.use_unbiased_kl else kl)
            total = total + token / (tokens if per_token else batch.rollout_mask_sums[i] * rollouts)
    return total


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"entropy_coef": 0.1},
        {"use_kl_loss": True, "kl_loss_coef": 0.3},
        {"use_kl_loss": True, "kl_loss_coef": 0.3, "use_unbiased_kl": True, "entropy_coef": -0.2},
    ],
)
def test_loss_and_gradient_against_the_formula(per_token: bool, changes: dict[str, Any]) -> None:
    args = make_args(**changes)
    problem = LossStep(MASKS, [0, 0, 1, 2, 3])
    expected = reference(problem, args, per_token)
    wanted = torch.autograd.grad(expected, problem.leaves, allow_unused=True)
    metrics, found = problem.run(PolicyLoss(args, EstimatorBase(args)), [range(5)], per_token)
    assert metrics["loss"] == pytest.approx(expected.item(), abs=1e-12)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, torch.zeros_like(a) if b is None else b)


class SequenceLevel(EstimatorBase):
    ratio_level: ClassVar[Any] = "sequence"


shapes = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=5), min_size=2, max_size=8)


@given(shapes, st.integers(0, 10_000), st.booleans(), st.sampled_from([EstimatorBase, SequenceLevel]))
def test_no_split_changes_gradient_or_metrics(
    masks: list[list[int]], seed: int, per_token: bool, kind: type[EstimatorBase]
) -> None:
    args = make_args(entropy_coef=0.1, use_kl_loss=True, kl_loss_coef=0.2)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(len(masks), (len(masks),), generator=generator).tolist()
    problem = LossStep(masks, ids, seed)
    whole = problem.run(PolicyLoss(args, kind(args)), [range(len(masks))], per_token)
    order = torch.randperm(len(masks), generator=generator).tolist()
    cuts = sorted(torch.randint(1, len(masks), (2,), generator=generator).tolist())
    parts = [p for p in (order[: cuts[0]], order[cuts[0] : cuts[1]], order[cuts[1] :]) if p]
    split = problem.run(PolicyLoss(args, kind(args)), parts, per_token)
    assert split[0].keys() == whole[0].keys()
    for name, value in whole[0].items():
        assert split[0][name] == pytest.approx(value, abs=1e-10), name
    for a, b in zip(split[1], whole[1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_metrics_are_the_reduced_quantities() -> None:
    args = make_args(entropy_coef=0.5, use_kl_loss=True, kl_loss_coef=0.25)
    problem = LossStep([[1, 1], [1, 1]])
    metrics, _ = problem.run(PolicyLoss(args, EstimatorBase(args)), [[0, 1]])
    assert set(metrics) == {"loss", "pg_loss", "entropy_loss", "kl_loss", "pg_clipfrac", "ppo_kl"}
    ref, old = problem.tensors.ref_log_probs, problem.tensors.old_log_probs
    assert ref is not None
    assert old is not None
    log_probs = torch.cat(problem.log_probs)
    assert metrics["kl_loss"] == pytest.approx(kl_estimate(log_probs, torch.cat(ref), "k3").mean().item())
    assert metrics["entropy_loss"] == pytest.approx(torch.cat(problem.entropy).mean().item())
    assert metrics["ppo_kl"] == pytest.approx((torch.cat(old) - log_probs).mean().item())
    total = metrics["pg_loss"] - 0.5 * metrics["entropy_loss"] + 0.25 * metrics["kl_loss"]
    assert metrics["loss"] == pytest.approx(total)


def test_masked_garbage_does_not_reach_the_loss() -> None:
    args = make_args(use_kl_loss=True, kl_loss_coef=0.1)
    problem = LossStep([[1, 0], [1, 1]])
    with torch.no_grad():
        problem.log_probs[0][1] = -torch.inf
    metrics, gradients = problem.run(PolicyLoss(args, EstimatorBase(args)), [[0, 1]])
    assert all(torch.isfinite(torch.tensor(value)) for value in metrics.values())
    assert all(torch.isfinite(g).all() for g in gradients)


@pytest.mark.parametrize(("per_token", "expected"), [(True, -(1 + 2 + 4 + 5 + 6) / 5), (False, -(1.5 + 5) / 2)])
def test_sft_loss(per_token: bool, expected: float) -> None:
    problem = LossStep([[1, 1, 0], [1, 1, 1]])
    with torch.no_grad():
        for part, values in zip(problem.log_probs, ([1.0, 2.0, 3.0], [4.0, 5.0, 6.0]), strict=True):
            part.copy_(torch.tensor(values))
    args = make_args()
    loss = SFTLoss(args, EstimatorBase(args))
    assert not loss.needs_advantages
    assert not loss.needs_entropy
    metrics, gradients = problem.run(loss, [[1], [0]], per_token)
    assert metrics == {"loss": pytest.approx(expected)}
    scale = 1 / 5 if per_token else 1 / 4
    torch.testing.assert_close(gradients[0], torch.tensor([-scale, -scale, 0.0], dtype=torch.float64))


torch.set_num_threads(1)

ARGS = Args(calculate_per_token_loss=False, rollout_max_response_len=10, custom_pg_loss_reducer_function_path="mine")
LOSS = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
MASK = torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0])


def test_a_reducer_gets_thudm_slimes_arguments_and_no_masked_garbage() -> None:
    seen: dict[str, Any] = {}

    def make(
        total_lengths: Sequence[int], response_lengths: Sequence[int], loss_masks: list[torch.Tensor], per_token: bool
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        seen.update(total=total_lengths, response=response_lengths, masks=loss_masks, per_token=per_token)
        return lambda values: values.sum()

    loss = LOSS.clone()
    loss[2] = torch.nan
    assert reduced(make, ARGS, loss, MASK, [5, 6], [3, 2]).item() == 12.0
    assert (seen["total"], seen["response"], seen["per_token"]) == ([5, 6], [3, 2], False)
    assert [m.tolist() for m in seen["masks"]] == [[1.0, 1.0, 0.0], [1.0, 1.0]]


@pytest.mark.parametrize(("answer", "found"), [(LOSS, r"shape \(5,\)"), (1.5, "float")])
def test_a_reducer_must_reduce(answer: Any, found: str) -> None:
    with pytest.raises(PluginError, match=f"path 'mine': the reducer must return a scalar tensor; found {found}"):
        reduced(lambda *_: lambda values: answer, ARGS, LOSS, MASK, [5, 6], [3, 2])
