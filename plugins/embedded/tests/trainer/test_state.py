"""Saving and loading: bitwise continuation, formats on disk, and refusals."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from slime_embedded.trainer import state
from slime_embedded.trainer.trainer import EmbeddedTrainer
from transformers import AutoModelForCausalLM

from slime_core.errors import CheckpointError
from slime_core.protocols import MicroBatchOutput
from slime_core.sample import TrainBatch

MakeArgs = Callable[..., SimpleNamespace]
MakeBatch = Callable[..., TrainBatch]


def noisy_loss(output: MicroBatchOutput) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Depends on the global random states, so that a continuation shows whether they were restored."""
    weight = torch.rand_like(output.log_probs) + random.random()
    loss = -(weight * output.log_probs).mean()
    return loss, {"loss": loss}


def train(trainer: EmbeddedTrainer, make_batch: MakeBatch, steps: range) -> list[dict[str, float]]:
    return [trainer.train_step(make_batch(4, seed=s), [[0, 1], [2, 3]], noisy_loss).metrics for s in steps]


def seeded(args: SimpleNamespace) -> EmbeddedTrainer:
    torch.manual_seed(7)
    random.seed(7)
    return EmbeddedTrainer(args)


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"save_dtype": "bfloat16"},
        {"lr_decay_style": "cosine", "lr_decay_iters": 10, "lr_warmup_iters": 2},
        {"use_stateless_adam": True},
        {"freeze_params_name_list": ["embed"]},
    ],
)
def test_two_plus_two_steps_equal_four(
    make_args: MakeArgs, make_batch: MakeBatch, tmp_path: Path, flags: dict[str, Any]
) -> None:
    straight = seeded(make_args(**flags))
    metrics = train(straight, make_batch, range(4))
    first = seeded(make_args(**flags))
    train(first, make_batch, range(2))
    first.save(tmp_path / "checkpoint")
    torch.manual_seed(99)
    random.seed(99)
    second = EmbeddedTrainer(make_args(**flags))
    second.load(tmp_path / "checkpoint")
    assert train(second, make_batch, range(2, 4)) == metrics[2:]
    assert torch.equal(second.optimizer.values, straight.optimizer.values)
    for name, moment in straight.optimizer.moments().items():
        assert torch.equal(second.optimizer.moments()[name], moment)


def test_transformers_opens_what_was_saved(make_args: MakeArgs, make_batch: MakeBatch, tmp_path: Path) -> None:
    trainer = seeded(make_args())
    train(trainer, make_batch, range(1))
    trainer.save(tmp_path / "checkpoint")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint")
    opened = dict(model.named_parameters())
    for name, tensor in trainer.named_weights():
        assert torch.equal(opened[name], tensor)


def test_save_dtype(make_args: MakeArgs, tmp_path: Path) -> None:
    EmbeddedTrainer(make_args(save_dtype="bfloat16")).save(tmp_path / "checkpoint")
    stored = load_file(tmp_path / "checkpoint" / "model.safetensors")
    assert {t.dtype for t in stored.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "checkpoint" / "config.json").read_text())["dtype"] == "bfloat16"
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint").dtype == torch.bfloat16


def test_without_optimizer_and_finetune(make_args: MakeArgs, make_batch: MakeBatch, tmp_path: Path) -> None:
    trainer = seeded(make_args(no_save_optim=True))
    train(trainer, make_batch, range(2))
    trainer.save(tmp_path / "checkpoint")
    assert not (tmp_path / "checkpoint/trainer/optimizer.safetensors").exists()
    with pytest.raises(CheckpointError, match="--no-load-optim"):
        EmbeddedTrainer(make_args()).load(tmp_path / "checkpoint")
    for flags in ({"no_load_optim": True}, {"finetune": True}):
        again = EmbeddedTrainer(make_args(**flags))
        again.load(tmp_path / "checkpoint")
        assert torch.equal(again.optimizer.values, trainer.optimizer.values)
        assert again.optimizer.steps == 0


def test_every_rank_gets_its_own_random_states_back(make_args: MakeArgs, tmp_path: Path) -> None:
    trainer = EmbeddedTrainer(make_args())
    saved = []
    for rank in (0, 1):
        torch.manual_seed(rank)
        saved.append(torch.get_rng_state())
        state.save_progress(tmp_path, trainer.optimizer, trainer.settings, rank, 2)
    for rank in (0, 1):
        torch.manual_seed(9)
        state.load_progress(tmp_path, trainer.optimizer, trainer.settings, rank, 2)
        assert torch.equal(torch.get_rng_state(), saved[rank])


def test_a_model_without_trainer_state_is_refused(make_args: MakeArgs, model_dir: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no trainer state.*--finetune"):
        EmbeddedTrainer(make_args()).load(model_dir)
    EmbeddedTrainer(make_args(finetune=True)).load(model_dir)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"lr": 0.5}, "lr 0.01 then, 0.5 now"),
        ({"use_stateless_adam": True}, "--use-stateless-adam differs"),
        ({"freeze_params_name_list": ["embed"]}, r"model\.embed_tokens\.weight: .* then, not trained now"),
    ],
)
def test_another_run_is_refused_with_the_difference(
    make_args: MakeArgs, tmp_path: Path, flags: dict[str, Any], named: str
) -> None:
    EmbeddedTrainer(make_args()).save(tmp_path / "checkpoint")
    with pytest.raises(CheckpointError, match=named):
        EmbeddedTrainer(make_args(**flags)).load(tmp_path / "checkpoint")


def test_another_number_of_processes_goes_on_with_process_zeros_states(
    make_args: MakeArgs, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    EmbeddedTrainer(make_args()).save(tmp_path / "checkpoint")
    saved = torch.get_rng_state()
    path = tmp_path / "checkpoint/trainer/state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "world_size": 4}))
    trainer = EmbeddedTrainer(make_args())
    torch.manual_seed(9)
    trainer.load(tmp_path / "checkpoint")
    assert torch.equal(torch.get_rng_state(), saved)
    assert "saved by 4 processes and this run has 1" in caplog.text
    torch.manual_seed(9)
    fresh = torch.get_rng_state()
    state.load_progress(tmp_path / "checkpoint", trainer.optimizer, trainer.settings, 1, 2)
    assert torch.equal(torch.get_rng_state(), fresh)


@pytest.mark.parametrize("file", ["trainer/state.json", "trainer/optimizer.safetensors", "model.safetensors"])
def test_a_torn_file_is_named(make_args: MakeArgs, tmp_path: Path, file: str) -> None:
    EmbeddedTrainer(make_args()).save(tmp_path / "checkpoint")
    path = tmp_path / "checkpoint" / file
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(CheckpointError, match="cannot be read"):
        EmbeddedTrainer(make_args()).load(tmp_path / "checkpoint")


@pytest.mark.parametrize("file", ["trainer/optimizer.safetensors", "model.safetensors"])
def test_a_missing_file_is_named(make_args: MakeArgs, tmp_path: Path, file: str) -> None:
    EmbeddedTrainer(make_args()).save(tmp_path / "checkpoint")
    (tmp_path / "checkpoint" / file).unlink()
    with pytest.raises(CheckpointError, match=Path(file).name):
        EmbeddedTrainer(make_args()).load(tmp_path / "checkpoint")


def test_a_checkpoint_of_another_architecture_is_refused(make_args: MakeArgs, tmp_path: Path, model_dir: Path) -> None:
    EmbeddedTrainer(make_args()).save(tmp_path / "checkpoint")
    path = tmp_path / "checkpoint/model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"] = torch.ones(5)
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight has shape \[5\], the model needs \[32\]"):
        EmbeddedTrainer(make_args()).load(tmp_path / "checkpoint")
