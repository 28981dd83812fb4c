"""The optimizer, its schedule and its state, random states."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from slime_embedded.trainer import state
from slime_embedded.trainer.optimizer import MAX_CONSECUTIVE_SKIPS, AdamSettings, FlatAdamW
from slime_embedded.trainer.parallel import DataParallel
from slime_embedded.trainer.schedule import LearningRateSchedule
from slime_embedded.trainer.state_files import capture_rng, restore_rng
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


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_steps_equal_torch_adamw_with_decay_on_matrices_only(clip: float) -> None:
    ours, plain = model(), model()
    optimizer = flat(ours, weight_decay=0.3, clip_grad=clip, beta2=0.95)
    decayed = [p for p in plain.parameters() if p.dim() > 1]
    others = [p for p in plain.parameters() if p.dim() <= 1]
    reference = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.3}, {"params": others, "weight_decay": 0.0}], lr=0.05, betas=(0.9, 0.95)
    )
    for step in range(4):
        optimizer.zero_grad()
        reference.zero_grad()
        backward(ours, step)
        backward(plain, step)
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), clip or math.inf)
        assert optimizer.step()["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
        reference.step()
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


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


def test_restore_keeps_the_counts_of_schedule_and_moments_apart() -> None:
    optimizer = flat(model(), LearningRateSchedule(lr=1.0, warmup_steps=10))
    optimizer.restore(steps=7, moment_steps=3)
    assert (optimizer.steps, optimizer.moment_steps) == (7, 3)
    assert optimizer.step()["lr"] == pytest.approx(0.7)


def test_reset_forgets_moments_but_not_the_schedule() -> None:
    ours = model()
    optimizer = flat(ours)
    backward(ours, 0)
    optimizer.step()
    optimizer.reset_moments()
    assert all(not tensor.any() for tensor in optimizer.moments().values())
    assert (optimizer.steps, optimizer.moment_steps) == (1, 0)


def test_offloaded_gradients_hold_no_memory_and_steps_go_on_bit_for_bit() -> None:
    modules = model(), model()
    optimizers = [flat(module) for module in modules]
    for step in range(3):
        for module, optimizer in zip(modules, optimizers, strict=True):
            optimizer.zero_grad()
            backward(module, step)
            optimizer.step()
        optimizers[0].offload()
        assert optimizers[0].grads.untyped_storage().nbytes() == 0
        assert all(p.grad.untyped_storage().nbytes() == 0 for p in modules[0].parameters())
        for (name, moment), other in zip(optimizers[0].moments().items(), optimizers[1].moments().values()):
            assert torch.equal(moment, other), f"{name} is saved while it is offloaded"
        optimizers[0].onload()
        assert not optimizers[0].grads.any()
    for a, b in zip(modules[0].parameters(), modules[1].parameters(), strict=True):
        assert torch.equal(a, b)


def schedule(**flags: Any) -> LearningRateSchedule:
    return LearningRateSchedule.from_args(Args(**{"lr": 1.0, "lr_decay_iters": 100, **flags}))


def test_constant_after_warmup() -> None:
    s = schedule(lr_decay_style="constant", lr_warmup_iters=4, lr_warmup_init=0.2)
    assert [s.at(n) for n in range(6)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])
    assert s.at(10**6) == 1.0


def test_linear() -> None:
    s = schedule(lr_decay_style="linear", min_lr=0.1, lr_warmup_iters=20)
    assert s.at(0) == 0.0
    assert s.at(20) == 1.0
    assert s.at(60) == pytest.approx(0.1 + 0.9 * 0.5)
    assert s.at(100) == pytest.approx(0.1)
    assert s.at(101) == 0.1


def test_inverse_square_root() -> None:
    s = schedule(lr_decay_style="inverse-square-root", lr_warmup_iters=4, min_lr=0.05)
    assert s.at(16) == pytest.approx(0.5)
    assert s.at(100) == pytest.approx(0.2)
    assert s.at(101) == 0.05
    endless = schedule(lr_decay_style="inverse-square-root", lr_decay_iters=None, lr_warmup_iters=4, min_lr=0.05)
    assert endless.at(101) == pytest.approx(math.sqrt(4 / 101))
    assert endless.at(10**6) == 0.05
    assert endless.facts() != s.facts()


@pytest.mark.parametrize(
    ("style", "middle"),
    [
        ("linear", 0.5),
        ("cosine", 0.5),
        ("minus_sqrt", 1 - math.sqrt(0.5)),
        ("exponential", 2 * math.sqrt(0.5) - 1),
    ],
)
def test_warmup_stable_decay(style: str, middle: float) -> None:
    s = schedule(lr_decay_style="WSD", lr_wsd_decay_style=style, lr_wsd_decay_iters=20)
    assert s.at(80) == 1.0
    assert s.at(90) == pytest.approx(middle)
    assert s.at(100) == pytest.approx(0.0)


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


def draw() -> list[float]:
    return [random.random(), random.gauss(0, 1), float(np.random.randn()), float(torch.rand(()))]


def test_every_generator_goes_on_where_it_was() -> None:
    random.gauss(0, 1)  # leaves a second normal number in waiting, which the state must carry
    np.random.randn()
    state = json.loads(json.dumps(capture_rng()))
    expected = draw() + draw()
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    restore_rng(state)
    assert draw() + draw() == expected


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
