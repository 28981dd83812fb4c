"""What is computed before the update: teachers, entropies, and the user's last word on the data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from slime_commands.sft.loss import SFTLoss

from slime_core.errors import PluginError, TrainError
from slime_core.estimator import EstimatorBase
from slime_core.learning.learner import Learner
from slime_core.learning.loss import PolicyLoss
from slime_core.sample import TrainBatch
from tests.toy_trainer import ToyTrainer, make_args, make_batch

torch.set_num_threads(1)


def learn(
    args: Any, batch: TrainBatch, trainer: ToyTrainer, postprocess: Callable[..., None] | None = None
) -> dict[str, float]:
    estimator = EstimatorBase(args)
    learner = Learner(args, trainer, estimator, PolicyLoss(args, estimator), postprocess=postprocess)
    return learner.train(0, batch)


# -- distillation ----------------------------------------------------------------------------------------


def mean(batch: TrainBatch, parts: list[torch.Tensor]) -> float:
    rows = zip(parts, batch.loss_masks, strict=True)
    return sum(float((part * torch.tensor(mask)).sum()) / sum(mask) for part, mask in rows) / len(batch)


@pytest.mark.parametrize("global_batch_size", [8, 4])
def test_a_local_teacher(global_batch_size: int) -> None:
    args = make_args(use_opd=True, opd_type="megatron", opd_teacher_load="teacher", global_batch_size=global_batch_size)
    trainer, fresh, batch = ToyTrainer(), ToyTrainer(), make_batch()
    metrics = learn(args, batch, trainer)
    calls = [call for call in trainer.calls if call != "train_step"]
    assert calls == ["log_probs actor 8", "log_probs teacher 8"]
    student, teacher = (fresh.log_probs(batch, [list(range(8))], role=role) for role in ("actor", "teacher"))
    gaps = [s - t for s, t in zip(student, teacher, strict=True)]
    assert metrics["rollout/opd_reverse_kl"] == pytest.approx(mean(batch, gaps), rel=1e-5)
    assert metrics["rollout/teacher_log_probs"] == pytest.approx(mean(batch, teacher), rel=1e-5)
    expected = [reward - gap for reward, gap in zip(batch.rewards, gaps, strict=True)]
    assert metrics["rollout/advantages"] == pytest.approx(mean(batch, expected), rel=1e-4, abs=1e-6)


def test_a_teacher_elsewhere_and_the_engine_as_the_student() -> None:
    batch = make_batch(shift=-0.5)
    batch.rewards = [0.0] * 8
    assert batch.rollout_log_probs is not None
    batch.teacher_log_probs = [[value - 0.25 for value in row] for row in batch.rollout_log_probs]
    args = make_args(use_opd=True, opd_type="sglang", use_rollout_logprobs=True, opd_kl_coef=2.0)
    trainer = ToyTrainer()
    metrics = learn(args, batch, trainer)
    assert trainer.calls == ["train_step"]
    assert metrics["rollout/opd_reverse_kl"] == pytest.approx(0.25, rel=1e-5)
    assert metrics["rollout/advantages"] == pytest.approx(-0.5, rel=1e-5)


def test_samples_without_teacher_log_probs() -> None:
    with pytest.raises(TrainError, match="carry no teacher_log_probs; type --custom-rm-path on_policy_distillation"):
        learn(make_args(use_opd=True, opd_type="sglang"), make_batch(), ToyTrainer())


# -- entropies -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", [False, True])
def test_entropies_come_from_the_log_prob_pass(engine: bool) -> None:
    args = make_args(use_rollout_entropy=True, use_rollout_logprobs=engine, global_batch_size=4)
    trainer, fresh, batch = ToyTrainer(), ToyTrainer(), make_batch()
    metrics = learn(args, batch, trainer)
    assert [call for call in trainer.calls if call != "train_step"] == ["log_probs_and_entropy 8"]
    _, entropies = fresh.log_probs_and_entropy(batch, [list(range(8))])
    assert metrics["rollout/entropy"] == pytest.approx(mean(batch, entropies), rel=1e-5)


# -- the user's last word --------------------------------------------------------------------------------


def test_the_hook_sees_everything_and_changes_what_is_trained_on() -> None:
    seen: dict[str, Any] = {}

    def negate(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
        seen.update(rollout_data, rollout_id=rollout_id)
        for part in rollout_data["advantages"]:
            part.neg_()

    args, batch = make_args(use_kl_loss=True, global_batch_size=4), make_batch()
    changed, plain = ToyTrainer(), ToyTrainer()
    learn(args, batch, changed, negate)
    mirrored = make_batch()
    mirrored.rewards = [-reward for reward in batch.rewards]
    learn(args, mirrored, plain)
    torch.testing.assert_close(changed.weight, plain.weight, rtol=1e-6, atol=1e-7)
    assert seen["rollout_id"] == 0
    keys = {"tokens", "total_lengths", "response_lengths", "loss_masks", "rewards", "raw_reward", "log_probs"}
    assert keys | {"advantages", "returns", "rollout_log_probs", "ref_log_probs", "kl"} <= seen.keys()
    assert [part.tolist() for part in seen["tokens"]] == batch.tokens
    # Log-probs of every sample, those of the first step too.
    assert [len(part) for part in seen["log_probs"]] == batch.response_lengths
    assert changed.calls[0] == "log_probs actor 8"
    # What it changed of advantages is not what it was shown of returns.
    assert seen["returns"][0][0].item() == pytest.approx(batch.rewards[0], rel=1e-6)


def test_masked_tokens_drop_out_and_the_others_keep_their_weight() -> None:
    batch, args = make_batch(), make_args()
    victim = max(range(8), key=lambda i: sum(batch.loss_masks[i]))

    def mask_all(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
        rollout_data["loss_masks"][victim] = [0] * len(rollout_data["loss_masks"][victim])

    changed, plain = ToyTrainer(), ToyTrainer()
    learn(args, batch, changed, mask_all)
    without = make_batch()
    without.rewards[victim] = 0.0
    learn(args, without, plain)
    torch.testing.assert_close(changed.weight, plain.weight, rtol=1e-6, atol=1e-7)


def spoil(key: str, value: Any) -> Callable[..., None]:
    def postprocess(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
        if value is None:
            del rollout_data[key]
        else:
            rollout_data[key] = value

    return postprocess


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("advantages", None, r'rollout_data\["advantages"\] is gone'),
        ("advantages", 3, r'rollout_data\["advantages"\] is a int'),
        ("advantages", [[0.0]] * 8, r"has shapes .*expected one tensor per sample"),
        ("returns", [["x"]] * 8, "expected a list of tensors"),
        ("loss_masks", "halves", "must hold 0 and 1 only"),
    ],
)
def test_what_the_hook_may_not_leave(key: str, value: Any, message: str) -> None:
    batch = make_batch()
    if value == "halves":
        value = [[0.5] * n for n in batch.response_lengths]
    with pytest.raises(PluginError, match=r"--rollout-data-postprocess-path\), rollout 1: .*" + message):
        learn(make_args(), batch, ToyTrainer(), spoil(key, value))


def test_the_hook_of_a_supervised_run() -> None:
    def mask_first(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
        assert "advantages" not in rollout_data
        rollout_data["loss_masks"][0].zero_()

    args, batch, trainer, plain = make_args(loss_type="sft_loss"), make_batch(), ToyTrainer(), ToyTrainer()
    loss = SFTLoss(args, EstimatorBase(args))
    Learner(args, trainer, None, loss, postprocess=mask_first).train(0, batch)
    assert trainer.calls == ["train_step"]
    Learner(args, plain, None, loss).train(0, batch)
    assert not torch.equal(trainer.weight, plain.weight)


# -- the old actor -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("global_batch_size", [8, 4])
def test_old_log_probs_are_those_of_the_kept_actor(global_batch_size: int) -> None:
    args, batch = make_args(keep_old_actor=True, global_batch_size=global_batch_size), make_batch()
    trainer = ToyTrainer()
    with torch.no_grad():
        trainer.weight += 0.5 * torch.randn(trainer.weight.shape, generator=torch.Generator().manual_seed(5)).double()
    metrics = learn(args, batch, trainer)
    assert [call for call in trainer.calls if call != "train_step"] == ["log_probs old_actor 8"]
    # The engine's log-probs are those of the weights at the start, which is the old actor.
    assert metrics["train/train_rollout_logprob_abs_diff"] < 1e-6
    assert abs(metrics["train/ppo_kl"]) > 1e-3
    fresh = learn(make_args(global_batch_size=global_batch_size), batch, ToyTrainer())
    assert fresh["train/pg_loss"] != pytest.approx(metrics["train/pg_loss"], abs=1e-4)
