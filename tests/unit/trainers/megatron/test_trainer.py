"""One process, real Megatron: what the parity tests over ranks do not look at."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from slime_embedded.trainer.optimizer import MAX_CONSECUTIVE_SKIPS
from slime_trainer_megatron.trainer import MegatronTrainer

from slime_core.config import Args
from slime_core.errors import ConfigError, TrainError
from slime_core.protocols import MicroBatchOutput
from tests.backends.megatron import trainer_jobs as jobs
from tests.megatron_models import save_tiny
from tests.unit.trainers.megatron.steps import MICRO_BATCHES, Make, equal, log_probs, loss_fn, step, weights


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    for name, variant, changes in (
        ("qwen3", "qwen3-tied", {}),
        ("other weights", "qwen3-tied", {"initializer_range": 0.2}),
        ("other architecture", "qwen2", {"num_hidden_layers": 3}),
    ):
        save_tiny(root / name, variant, **changes)
    return {path.name: path for path in root.iterdir()}


@pytest.fixture
def make(build: Make, models: dict[str, Path]) -> Make:
    return lambda role="actor", model="qwen3", **flags: build(models[model], role, **flags)


def test_frozen_models_keep_their_weights(make: Make, models: dict[str, Path]) -> None:
    own = {"use_kl_loss": True, "use_opd": True, "opd_type": "megatron", "keep_old_actor": True}
    teacher = str(models["other weights"])
    trainer = make(**own, opd_teacher_load=teacher)
    first = log_probs(trainer)
    assert equal(log_probs(trainer, "ref"), first)
    assert equal(log_probs(trainer, "old_actor"), first)
    before = weights(trainer)
    of_teacher = log_probs(trainer, "teacher")
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(trainer).items())
    step(trainer)
    after = log_probs(trainer)
    assert not equal(after, first)
    assert equal(log_probs(trainer, "ref"), first)
    assert equal(log_probs(trainer, "teacher"), of_teacher)
    trainer.update_old_actor()
    trainer.update_reference()
    step(trainer)
    assert equal(log_probs(trainer, "old_actor"), after)
    assert equal(log_probs(trainer, "ref"), after)
    trainer.close()
    assert equal(log_probs(make(model="other weights")), of_teacher)


def test_every_row_has_its_own_teacher(make: Make, models: dict[str, Path]) -> None:
    """A teacher in the actor's modules, one with its own; every row's log-probs are those of a run of its own."""
    own = {name: make(model=name) for name in ("other weights", "other architecture")}
    first, second = (log_probs(trainer) for trainer in own.values())
    for trainer in own.values():
        trainer.close()
    named = {"far": {"path": str(models["other architecture"])}}
    trainer = make(
        use_opd=True, opd_type="megatron", opd_teacher_load=str(models["other weights"]),
        plugins={"on_policy_distillation": {"teachers": named}},
    )  # fmt: skip
    batch = jobs.batch()
    batch.train_metadata = [{"teacher": "far"} if i % 3 == 1 else None for i in range(len(batch))]
    found = trainer.log_probs(batch, MICRO_BATCHES, role="teacher")
    for i, own_log_probs in enumerate(found):
        torch.testing.assert_close(own_log_probs, (second if i % 3 == 1 else first)[i], rtol=1e-5, atol=1e-5)
    assert all((a - b).abs().max() > 0.1 for a, b in zip(first, second, strict=True))
    assert equal(log_probs(trainer, "teacher"), first), "no row names another"
    batch.train_metadata[0] = {"teacher": "art"}
    with pytest.raises(TrainError, match=r"names the teacher 'art'; .*teachers has far in the trainer"):
        trainer.log_probs(batch, MICRO_BATCHES, role="teacher")


def test_a_moving_reference_has_the_actors_architecture(make: Make, models: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="another architecture"):
        make(use_kl_loss=True, ref_load=str(models["other architecture"]), ref_update_interval=1)
    assert not torch.distributed.is_initialized(), "a trainer that cannot be built leaves its groups"


def test_a_role_that_is_not_there_says_when_it_is(make: Make) -> None:
    trainer = make()
    with pytest.raises(TrainError, match="'ref' model; it is loaded when --kl-coef"):
        log_probs(trainer, "ref")
    with pytest.raises(TrainError, match="--keep-old-actor"):
        trainer.update_old_actor()
    with pytest.raises(TrainError, match="role='critic'"):
        trainer.values(jobs.batch(), MICRO_BATCHES)


def test_samples_that_are_left_out(make: Make) -> None:
    trainer = make()
    with pytest.raises(TrainError, match=r"samples at \[4, 5, 6, 7\] are in no micro-batch"):
        trainer.log_probs(jobs.batch(), [[0, 1, 2, 3]])
    with pytest.raises(TrainError, match="without micro-batches"):
        trainer.train_step(jobs.batch(), [], loss_fn)


def test_a_step_that_is_not_finite_changes_nothing(make: Make) -> None:
    trainer = make()
    step(trainer)
    before = weights(trainer)

    def broken(output: MicroBatchOutput) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return output.log_probs.sum() * math.inf, {}

    for _ in range(MAX_CONSECUTIVE_SKIPS - 1):
        metrics = step(trainer, loss=broken)
        assert metrics["skipped_steps"] == 1
        assert not math.isfinite(metrics["grad_norm"])
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(trainer).items())
    assert trainer.optimizer.steps == 1
    with pytest.raises(TrainError, match="optimizer steps in a row"):
        step(trainer, loss=broken)
    assert step(trainer)["skipped_steps"] == 0


def test_only_some_parameters_are_trained(make: Make) -> None:
    trainer = make(only_train_params_name_list=[r"layers\.2\.mlp", "norm"], recompute_granularity="full")
    before = weights(trainer)
    step(trainer)
    changed = {name for name, tensor in weights(trainer).items() if not torch.equal(tensor, before[name])}
    assert changed == {name for name in before if "layers.2.mlp" in name or "norm" in name}


def test_a_choice_that_cannot_be(make: Make) -> None:
    with pytest.raises(ConfigError, match="give one of the two"):
        make(only_train_params_name_list=["a"], freeze_params_name_list=["b"])
    assert not torch.distributed.is_initialized(), "a trainer that cannot be built leaves its groups"


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, 2), ({"actor_num_gpus_per_node": 8}, 8), ({"actor_num_nodes": 2, "actor_num_gpus_per_node": 4}, 8)],
)
def test_how_many_processes_a_run_needs(given: dict[str, Any], expected: int) -> None:
    args = Args(tensor_model_parallel_size=2, **given)
    settings = SimpleNamespace(args=args, is_given=given.__contains__)
    assert MegatronTrainer.processes(settings) == expected


@pytest.mark.slow
def test_bfloat16_keeps_float32_weights_to_learn(make: Make) -> None:
    """Steps smaller than a bfloat16 can show still add up."""
    trainer = make(
        dtype="bfloat16", lr=2e-5, lr_warmup_iters=0, lr_warmup_init=0.0, lr_decay_style="constant", weight_decay=0.0
    )
    before = weights(trainer)
    assert all(tensor.dtype == torch.bfloat16 for tensor in before.values())
    shares = []
    for _ in range(12):
        step(trainer)
        now = weights(trainer)
        moved = sum(int((now[name] != before[name]).sum()) for name in now)
        shares.append(moved / sum(tensor.numel() for tensor in now.values()))
    assert shares[0] < 0.5 * shares[-1]
