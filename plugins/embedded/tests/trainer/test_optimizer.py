"""The flat AdamW against torch's AdamW on ordinary parameters."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from slime_embedded.trainer.optimizer import MAX_CONSECUTIVE_SKIPS, AdamSettings, FlatAdamW
from slime_embedded.trainer.parallel import DataParallel
from slime_embedded.trainer.schedule import LearningRateSchedule
from torch import nn

from slime_core.errors import TrainError

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
