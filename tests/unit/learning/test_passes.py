"""What is computed before the update: teachers, entropies, and the user's last word on the data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import orjson
import pytest
import torch
from slime_commands.sft.loss import SFTLoss
from slime_testing_contracts.tiny import tiny_moe_model

from slime_core.errors import PluginError, TrainError
from slime_core.estimator import EstimatorBase
from slime_core.learning.learner import routing_arrays
from slime_core.models.family import RoutedLayers, routed_layers
from slime_core.sample import TrainBatch
from slime_core.sample.routed_experts import FREE, RoutedExperts, json_default
from tests.batches import train_batch
from tests.toy_trainer import Ranks, ToyTrainer, learn, make_args, make_batch

torch.set_num_threads(1)


# -- distillation ----------------------------------------------------------------------------------------


def mean(batch: TrainBatch, parts: list[torch.Tensor]) -> float:
    rows = zip(parts, batch.loss_masks, strict=True)
    return sum(float((part * torch.tensor(mask)).sum()) / sum(mask) for part, mask in rows) / len(batch)


@pytest.mark.parametrize("global_batch_size", [8, 4])
def test_a_local_teacher(global_batch_size: int) -> None:
    args = make_args(use_opd=True, opd_type="megatron", opd_teacher_load="teacher", global_batch_size=global_batch_size)
    fresh, batch = ToyTrainer(), make_batch()
    metrics, trainer = learn(args, batch)
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
    metrics, trainer = learn(args, batch)
    assert trainer.calls == ["train_step"]
    assert metrics["rollout/opd_reverse_kl"] == pytest.approx(0.25, rel=1e-5)
    assert metrics["rollout/advantages"] == pytest.approx(-0.5, rel=1e-5)


def test_samples_without_teacher_log_probs() -> None:
    with pytest.raises(TrainError, match="carry no teacher_log_probs; type --custom-rm-path on_policy_distillation"):
        learn(make_args(use_opd=True, opd_type="sglang"), make_batch())


# -- entropies -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", [False, True])
def test_entropies_come_from_the_log_prob_pass(engine: bool) -> None:
    args = make_args(use_rollout_entropy=True, use_rollout_logprobs=engine, global_batch_size=4)
    fresh, batch = ToyTrainer(), make_batch()
    metrics, trainer = learn(args, batch)
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
    _, changed = learn(args, batch, postprocess=negate)
    mirrored = make_batch()
    mirrored.rewards = [-reward for reward in batch.rewards]
    _, plain = learn(args, mirrored)
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

    _, changed = learn(args, batch, postprocess=mask_all)
    without = make_batch()
    without.rewards[victim] = 0.0
    _, plain = learn(args, without)
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
        learn(make_args(), batch, postprocess=spoil(key, value))


def test_the_hook_of_a_supervised_run() -> None:
    def mask_first(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
        assert "advantages" not in rollout_data
        rollout_data["loss_masks"][0].zero_()

    args, batch = make_args(loss_type="sft_loss"), make_batch()

    def sft(args: Any, _: Any) -> SFTLoss:
        return SFTLoss(args, EstimatorBase(args))

    _, trainer = learn(args, batch, estimator=lambda args: None, loss=sft, postprocess=mask_first)
    assert trainer.calls == ["train_step"]
    _, plain = learn(args, batch, estimator=lambda args: None, loss=sft)
    assert not torch.equal(trainer.weight, plain.weight)


# -- the old actor -----------------------------------------------------------------------------------------


class Moved(ToyTrainer):
    """A trainer whose weights have moved away from the kept ones."""

    def __init__(self, rank: int, ranks: Ranks) -> None:
        super().__init__(rank, ranks)
        with torch.no_grad():
            self.weight += 0.5 * torch.randn(self.weight.shape, generator=torch.Generator().manual_seed(5)).double()


@pytest.mark.parametrize("global_batch_size", [8, 4])
def test_old_log_probs_are_those_of_the_kept_actor(global_batch_size: int) -> None:
    args, batch = make_args(keep_old_actor=True, global_batch_size=global_batch_size), make_batch()
    metrics, trainer = learn(args, batch, trainer=Moved)
    assert [call for call in trainer.calls if call != "train_step"] == ["log_probs old_actor 8"]
    # The engine's log-probs are those of the weights at the start, which is the old actor.
    assert metrics["train/train_rollout_logprob_abs_diff"] < 1e-6
    assert abs(metrics["train/ppo_kl"]) > 1e-3
    fresh, _ = learn(make_args(global_batch_size=global_batch_size), batch)
    assert fresh["train/pg_loss"] != pytest.approx(metrics["train/pg_loss"], abs=1e-4)


@pytest.fixture(scope="module")
def model() -> RoutedLayers:
    return routed_layers(tiny_moe_model(), None)


def batch(*rows: object) -> TrainBatch:
    """One sample of four tokens per row."""
    tokens = [[1, 2, 3, 4]] * len(rows)
    return train_batch([[1, 1]] * len(rows), rollout_id=2, tokens=tokens, routed_experts=list(rows))


GIVEN = np.array([[[0, 3], [0, 0], [5, 1]], [[2, 2], [0, 0], [7, 6]], [[FREE, FREE], [0, 0], [1, 0]]], np.int32)
KEPT = GIVEN.copy()
KEPT[:, 1] = FREE  # a dense layer
KEPT[1, 0] = FREE  # twice the same expert is none


def test_rows_in_every_form(model: RoutedLayers) -> None:
    stored = orjson.loads(orjson.dumps(RoutedExperts.of(GIVEN), default=json_default))  # from another process
    found = routing_arrays(batch(GIVEN, GIVEN.tolist(), RoutedExperts.of(GIVEN), stored, None), model)
    for array in found[:4]:
        np.testing.assert_array_equal(array, KEPT)
        assert array.dtype == np.int32
    assert (found[4] == FREE).all()
    assert found[0] is not GIVEN, "the trainer fills them in"


def test_a_batch_without_the_column_gets_empty_ones(model: RoutedLayers) -> None:
    found = routing_arrays(replace(batch(None, None), routed_experts=None), model)
    assert [array.shape for array in found] == [(3, 3, 2)] * 2
    assert all((array == FREE).all() for array in found)


@pytest.mark.parametrize("wrong", [GIVEN[:2], GIVEN[:, :2], GIVEN[:, :, :1], np.where(GIVEN == 7, 8, GIVEN)])
def test_another_models_experts_are_named(model: RoutedLayers, wrong: np.ndarray) -> None:
    with pytest.raises(TrainError, match=r"sample 1 of rollout 3: .*3 layers and 2 of 8 experts per token"):
        routing_arrays(batch(None, wrong), model)
