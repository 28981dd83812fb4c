"""The optimizer, its schedule and its state, random states."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from slime_embedded.trainer import state
from slime_embedded.trainer.optimizer import MAX_CONSECUTIVE_SKIPS, AdamSettings, FlatAdamW
from slime_embedded.trainer.parallel import DataParallel
from slime_embedded.trainer.schedule import LearningRateSchedule
from slime_embedded.trainer.trainer import EmbeddedTrainer
from torch import nn
from transformers import AutoModelForCausalLM

from slime_core.config import Args
from slime_core.errors import CheckpointError, ConfigError, TrainError
from slime_core.protocols import MicroBatchOutput
from slime_core.sample import TrainBatch

CONSTANT = LearningRateSchedule(lr=0.05)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3))


def flat(module: nn.Module, schedule: LearningRateSchedule = CONSTANT, **settings: Any) -> FlatAdamW:
    return FlatAdamW(module.named_parameters(), AdamSettings(**settings), schedule, DataParallel("cpu"))


def backward(module: nn.Module, step: int) -> None:
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(step))
    module(x).pow(2).sum().backward()


def test_stateless_adam_is_a_first_step_every_time() -> None:
    ours = model()
    optimizer = flat(ours, stateless=True, clip_grad=0.0, weight_decay=0.1)
    for step in range(2):
        before = {name: p.detach().clone() for name, p in ours.named_parameters()}
        optimizer.zero_grad()
        backward(ours, step)
        optimizer.step()
        for name, parameter in ours.named_parameters():
            decay = 1 - 0.05 * 0.1 if parameter.dim() > 1 else 1.0
            expected = before[name] * decay - 0.05 * parameter.grad / (parameter.grad.abs() + 1e-8)
            torch.testing.assert_close(parameter, expected)
    assert optimizer.moments() == {}


def test_the_schedule_counts_steps_and_skips_change_nothing() -> None:
    ours = model()
    optimizer = flat(ours, LearningRateSchedule(lr=1.0, warmup_steps=10))
    backward(ours, 0)
    assert optimizer.step()["lr"] == 0.0
    optimizer.zero_grad()
    backward(ours, 1)
    before = optimizer.values.clone()
    optimizer.grads[3] = math.nan
    result = optimizer.step()
    assert result["skipped_steps"] == 1.0
    assert torch.equal(optimizer.values, before)
    assert optimizer.moment_steps == 1
    optimizer.zero_grad()
    backward(ours, 2)
    assert optimizer.step()["lr"] == pytest.approx(0.1)


def test_skips_in_a_row_stop_the_run() -> None:
    optimizer = flat(model())
    optimizer.grads[0] = math.inf
    for _ in range(MAX_CONSECUTIVE_SKIPS - 1):
        optimizer.step()
    with pytest.raises(TrainError, match="gradient norm was inf in 5 optimizer steps"):
        optimizer.step()


def schedule(**flags: Any) -> LearningRateSchedule:
    return LearningRateSchedule.from_args(Args(**{"lr": 1.0, "lr_decay_iters": 100, **flags}))


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (
            {"lr_decay_style": "constant", "lr_warmup_iters": 4, "lr_warmup_init": 0.2},
            {0: 0.2, 1: 0.4, 3: 0.8, 4: 1.0, 10**6: 1.0},
        ),
        (
            {"lr_decay_style": "linear", "min_lr": 0.1, "lr_warmup_iters": 20},
            {0: 0.0, 20: 1.0, 60: 0.1 + 0.9 * 0.5, 100: 0.1, 101: 0.1},
        ),
        (
            {"lr_decay_style": "inverse-square-root", "lr_warmup_iters": 4, "min_lr": 0.05},
            {16: 0.5, 100: 0.2, 101: 0.05},
        ),
        (
            {"lr_decay_style": "inverse-square-root", "lr_decay_iters": None, "lr_warmup_iters": 4, "min_lr": 0.05},
            {101: math.sqrt(4 / 101), 10**6: 0.05},
        ),
        *[
            (
                {"lr_decay_style": "WSD", "lr_wsd_decay_style": style, "lr_wsd_decay_iters": 20},
                {80: 1.0, 90: middle, 100: 0.0},
            )
            for style, middle in (
                ("linear", 0.5),
                ("cosine", 0.5),
                ("minus_sqrt", 1 - math.sqrt(0.5)),
                ("exponential", 2 * math.sqrt(0.5) - 1),
            )
        ],
    ],
)
def test_schedules(flags: dict[str, Any], expected: dict[int, float]) -> None:
    found = schedule(**flags)
    assert {step: found.at(step) for step in expected} == pytest.approx(expected, abs=1e-12)


def test_total_steps_follow_from_the_run() -> None:
    s = schedule(
        lr_decay_iters=None,
        lr_decay_style="linear",
        lr_warmup_fraction=0.1,
        num_rollout=50,
        rollout_batch_size=32,
        n_samples_per_prompt=8,
        global_batch_size=128,
    )
    assert s.decay_steps == 100
    assert s.warmup_steps == 10


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"lr_decay_style": "linear", "lr_decay_iters": None, "num_rollout": 3}, "--rollout-batch-size"),
        ({"lr_warmup_iters": 5, "lr_warmup_fraction": 0.1}, "give one of the two"),
        ({"lr_decay_style": "WSD"}, "--lr-wsd-decay-iters"),
        ({"min_lr": 2.0}, "--min-lr 2.0"),
        ({"lr_warmup_init": 2.0}, "--lr-warmup-init 2.0"),
        ({"lr_decay_style": "linear", "lr_warmup_iters": 100}, "leave nothing"),
    ],
)
def test_contradictions_name_the_flag(flags: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        schedule(**flags)


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
        {"use_stateless_adam": True, "freeze_params_name_list": ["embed"]},
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


@pytest.mark.parametrize(
    ("file", "torn"),
    [
        ("trainer/state.json", True),
        ("trainer/optimizer.safetensors", True),
        ("model.safetensors", True),
        ("trainer/optimizer.safetensors", False),
        ("model.safetensors", False),
    ],
)
def test_a_torn_or_missing_file_is_named(make_args: MakeArgs, tmp_path: Path, file: str, torn: bool) -> None:
    EmbeddedTrainer(make_args()).save(tmp_path / "checkpoint")
    path = tmp_path / "checkpoint" / file
    half = path.read_bytes()[: path.stat().st_size // 2]
    path.unlink()
    if torn:
        path.write_bytes(half)
    with pytest.raises(CheckpointError, match="cannot be read" if torn else path.name):
        EmbeddedTrainer(make_args()).load(tmp_path / "checkpoint")
