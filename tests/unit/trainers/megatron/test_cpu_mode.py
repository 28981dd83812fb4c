"""Megatron on a CPU: the mode that stands in for CUDA, and what it leaves behind."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from slime_trainer_megatron import cpu_mode
from slime_trainer_megatron.cpu_mode import on_device
from slime_trainer_megatron.process_groups import ProcessGroups


def test_everything_is_as_before_outside() -> None:
    before = [(owner, name, owner.__dict__.get(name)) for owner, name, _ in cpu_mode._fixes()]
    with on_device("cpu"), on_device("cpu"):
        assert torch.zeros(1, device="cuda").device.type == "cpu"
        assert torch.zeros(1).type() == "torch.cuda.FloatTensor"
    with pytest.raises(ZeroDivisionError), on_device("cpu"):
        _ = 1 / 0
    assert [(owner, name, owner.__dict__.get(name)) for owner, name, _ in cpu_mode._fixes()] == before
    assert torch.zeros(1).type() == "torch.FloatTensor"


def test_the_norm_of_a_large_gradient_is_exact(groups: ProcessGroups) -> None:
    """Upstream's sum in float32 is wrong by several percent here."""
    from megatron.core.optimizer.clip_grads import get_grad_norm_fp32

    gradient = torch.full((40_000_000,), 1e-4)
    with on_device("cpu"):
        found = get_grad_norm_fp32([gradient], grad_stats_parallel_group=dist.group.WORLD)
    assert found == pytest.approx(float(gradient[0]) * 40_000_000**0.5, rel=1e-5)
