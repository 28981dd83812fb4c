from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from slime_commands.sft.loss import SFTLoss

from slime_core.errors import ConfigError, TrainError
from slime_core.estimator import EstimatorBase
from slime_core.learning.learner import Learner
from slime_core.learning.loss import PolicyLoss
from slime_core.protocols import AdvantageInputs, Advantages
from tests.toy_trainer import Ranks, ToyTrainer, learn, make_args, make_batch

torch.set_num_threads(1)


# -- the update ------------------------------------------------------------------------------------------


def test_one_step_is_reinforce_written_by_hand() -> None:
    args, batch = make_args(), make_batch()
    metrics, trainer = learn(args, batch)
    assert trainer.calls == ["train_step"]
    fresh = ToyTrainer()
    loss = torch.zeros((), dtype=torch.float64)
    for i, mask in enumerate(batch.loss_masks):
        log_probs = fresh.output(fresh.weight, batch, [i]).log_probs
        weights = torch.tensor(mask, dtype=torch.float64)
        loss = loss - (log_probs * weights).sum() * batch.rewards[i] / weights.sum() / 8
    (gradient,) = torch.autograd.grad(loss, fresh.weight)
    torch.testing.assert_close(trainer.weight.detach(), (fresh.weight - gradient).detach(), rtol=1e-6, atol=1e-7)
    assert metrics["train/grad_norm"] == pytest.approx(gradient.norm().item(), rel=1e-5)
    assert metrics["train/ppo_kl"] == metrics["train/pg_clipfrac"] == 0.0
    assert metrics["train/steps"] == 1.0


@pytest.mark.parametrize(("per_token", "siblings"), [(False, True), (True, False)])
@pytest.mark.parametrize(
    ("world_size", "changes"),
    [
        (1, {"micro_batch_size": 1}),
        (4, {"micro_batch_size": 1}),
        (2, {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 9}),
    ],
)
def test_no_split_over_micro_batches_or_ranks_changes_anything(
    world_size: int, changes: dict[str, Any], siblings: bool, per_token: bool
) -> None:
    common = {
        "calculate_per_token_loss": per_token,
        "global_batch_size": 2 if siblings else 4,
        "normalize_advantages": True,
        "entropy_coef": 0.05,
        "use_kl_loss": True,
        "kl_loss_coef": 0.1,
    }
    batch = make_batch(shift=0.1, siblings=siblings)
    whole, expected = learn(make_args(micro_batch_size=8, **common), batch)
    found, trainer = learn(make_args(**{**common, **changes}), batch, world_size)
    assert found.keys() == whole.keys()
    assert found["train/steps"] == 2.0
    for name, value in whole.items():
        assert found[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
    torch.testing.assert_close(trainer.weight, expected.weight, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("world_size", [1, 2])
def test_using_the_first_steps_log_probs_again_changes_nothing(world_size: int) -> None:
    args, batch = make_args(global_batch_size=2, micro_batch_size=1), make_batch(shift=0.1)
    reused, trainer = learn(args, batch, world_size)
    recomputed, expected = learn(args, batch, world_size, Reads)
    assert reused.keys() == recomputed.keys()
    for name, value in recomputed.items():
        assert reused[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
    torch.testing.assert_close(trainer.weight, expected.weight, rtol=1e-6, atol=1e-7)


# -- which log-probs -------------------------------------------------------------------------------------


class SequenceLevel(EstimatorBase):
    ratio_level: ClassVar[Any] = "sequence"


class Reads(EstimatorBase):
    needs_log_probs: ClassVar[bool] = True

    def advantages(self, args: Any, inputs: AdvantageInputs) -> Advantages:
        assert inputs.log_probs is not None
        return super().advantages(args, inputs)


@pytest.mark.parametrize(
    ("changes", "estimator", "calls"),
    [
        ({}, EstimatorBase, []),
        ({"global_batch_size": 4}, EstimatorBase, ["log_probs actor 4"]),
        ({"global_batch_size": 4}, SequenceLevel, ["log_probs actor 4"]),
        ({}, SequenceLevel, []),
        ({}, Reads, ["log_probs actor 8"]),
        ({"kl_coef": 0.1}, EstimatorBase, ["log_probs actor 8", "log_probs ref 8"]),
        ({"use_kl_loss": True}, EstimatorBase, ["log_probs ref 8"]),
        ({"use_rollout_logprobs": True}, EstimatorBase, []),
        ({"use_rollout_logprobs": True, "global_batch_size": 4}, EstimatorBase, []),
    ],
)
def test_log_probs_are_computed_only_where_needed(
    changes: dict[str, Any], estimator: Callable[[Any], Any], calls: list[str]
) -> None:
    _, trainer = learn(make_args(**changes), make_batch(), estimator=estimator)
    assert [call for call in trainer.calls if call != "train_step"] == calls


def test_the_engines_log_probs_as_the_old_policy() -> None:
    metrics, _ = learn(make_args(use_rollout_logprobs=True), make_batch(shift=-0.5))
    assert metrics["train/ppo_kl"] == pytest.approx(-0.5, abs=1e-6)
    assert metrics["train/train_rollout_logprob_abs_diff"] == pytest.approx(0.5, abs=1e-6)
    batch = make_batch()
    batch.rollout_log_probs = None
    with pytest.raises(TrainError, match="rollout 1: --use-rollout-logprobs, but the samples carry no"):
        learn(make_args(use_rollout_logprobs=True), batch)


def test_the_reference_is_refreshed_every_interval() -> None:
    args = make_args(ref_update_interval=2, use_kl_loss=True)
    trainer = ToyTrainer()
    learner = Learner(args, trainer, EstimatorBase(args), PolicyLoss(args, EstimatorBase(args)))
    for rollout_id in range(4):
        learner.train(rollout_id, make_batch())
    one = ["log_probs ref 8", "train_step"]
    assert trainer.calls == [*one, *one, "update_reference"] * 2
    assert torch.equal(trainer.reference, trainer.weight.detach())


# -- metrics ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("global_batch_size", "world_size"), [(8, 1), (4, 2)])
def test_the_gap_between_trainer_and_engine(global_batch_size: int, world_size: int) -> None:
    batch = make_batch()
    assert batch.rollout_log_probs is not None
    spread = [0.25 if i == 3 else 0.0 for i in range(8)]
    batch.rollout_log_probs = [[v - s for v in row] for row, s in zip(batch.rollout_log_probs, spread, strict=True)]
    metrics, _ = learn(make_args(global_batch_size=global_batch_size), batch, world_size)
    tokens = sum(map(sum, batch.loss_masks))
    expected = 0.25 * sum(batch.loss_masks[3]) / tokens
    assert metrics["train/train_rollout_logprob_abs_diff"] == pytest.approx(expected, abs=1e-6)
    assert metrics["train/train_rollout_logprob_abs_diff_max"] == pytest.approx(0.25, abs=1e-6)


def test_rollout_metrics_are_means_over_rollouts_of_masked_means() -> None:
    batch = make_batch(shift=-0.25)
    batch.loss_masks[5] = [0] * batch.response_lengths[5]
    batch.rollout_mask_sums[5] = 0
    metrics, _ = learn(make_args(kl_coef=0.5), batch)

    def mean(rows: Sequence[torch.Tensor]) -> float:
        parts = [(r * torch.tensor(m)).sum() / max(sum(m), 1) for r, m in zip(rows, batch.loss_masks, strict=True)]
        return float(sum(parts)) / 8

    fresh = ToyTrainer()
    old, ref = (fresh.log_probs(batch, [list(range(8))], role=role) for role in ("actor", "ref"))
    assert metrics["rollout/log_probs"] == pytest.approx(mean(old), abs=1e-6)
    assert metrics["rollout/ref_log_probs"] == pytest.approx(mean(ref), abs=1e-6)
    assert metrics["rollout/rollout_log_probs"] == pytest.approx(mean(old) - 0.25 * 7 / 8, abs=1e-6)
    kl = [torch.exp(r - o) - 1 - (r - o) for o, r in zip(old, ref, strict=True)]
    assert metrics["rollout/kl"] == pytest.approx(mean(kl), rel=1e-5)
    trained = [r for i, r in enumerate(batch.rewards) if i != 5]
    assert metrics["rollout/advantages"] == pytest.approx(sum(trained) / 8, abs=1e-6)
    assert metrics["rollout/rewards"] == pytest.approx(sum(trained) / 7, abs=1e-6)
    assert metrics["rollout/masked_samples"] == 1.0
    assert metrics["rollout/response_lengths"] == pytest.approx(sum(batch.response_lengths) / 8)


class Forced(ToyTrainer):
    """Answers a step with other metrics than its own."""

    def __init__(self, rank: int, ranks: Ranks, **forced: float) -> None:
        super().__init__(rank, ranks)
        self.forced = forced


def test_skipped_steps_are_counted_and_a_gradient_that_is_not_finite_must_be_skipped() -> None:
    skips = partial(Forced, skipped_steps=1.0, grad_norm=float("inf"))
    metrics, trainer = learn(make_args(global_batch_size=4), make_batch(), trainer=skips)
    assert metrics["train/skipped_steps"] == 2.0
    assert metrics["train/lr"] == trainer.lr
    with pytest.raises(TrainError, match="rollout 1, optimizer step 0: gradient norm nan"):
        learn(make_args(), make_batch(), trainer=partial(Forced, grad_norm=float("nan")))


# -- what cannot be trained on ---------------------------------------------------------------------------


def test_everything_masked() -> None:
    batch = make_batch()
    batch.loss_masks = [[0] * n for n in batch.response_lengths]
    with pytest.raises(TrainError, match="rollout 1: every response token of all 8 samples is masked"):
        learn(make_args(), batch)


def test_a_loss_that_is_not_finite_names_the_samples_before_the_weights_change() -> None:
    batch = make_batch()
    batch.rewards[2] = float("nan")
    args = make_args()
    trainer = ToyTrainer()
    before = trainer.weight.detach().clone()
    learner = Learner(args, trainer, EstimatorBase(args), PolicyLoss(args, EstimatorBase(args)))
    with pytest.raises(TrainError, match=r"rollout 8: the loss of a micro-batch is nan \(samples \[102, 103\]"):
        learner.train(7, batch)
    assert torch.equal(trainer.weight.detach(), before)


# -- supervised ------------------------------------------------------------------------------------------


def test_sft_needs_no_estimator_and_lowers_the_loss() -> None:
    args = make_args(loss_type="sft_loss", compute_advantages_and_returns=False, global_batch_size=4)
    trainer = ToyTrainer()
    learner = Learner(args, trainer, None, SFTLoss(args, EstimatorBase(args)))
    batch = make_batch()
    batch.rollout_log_probs = None
    losses = [learner.train(i, batch)["train/loss"] for i in range(20)]
    assert set(trainer.calls) == {"train_step"}
    assert losses[-1] < losses[0] / 2


def test_a_policy_loss_without_advantages_is_refused() -> None:
    args = make_args(compute_advantages_and_returns=False)
    with pytest.raises(ConfigError, match="--loss-type policy_loss needs advantages"):
        Learner(args, ToyTrainer(), EstimatorBase(args), PolicyLoss(args, EstimatorBase(args)))
