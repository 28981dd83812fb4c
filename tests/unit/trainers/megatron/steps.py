"""One step of a trainer over the samples of `trainer_jobs.batch`, and what is compared afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from slime_trainer_megatron.trainer import MegatronTrainer

from slime_core.protocols import MicroBatchOutput
from tests.backends.megatron import trainer_jobs

MICRO_BATCHES = [[0, 1, 2], [3, 4, 5, 6, 7]]
Make = Callable[..., MegatronTrainer]


def loss_fn(output: MicroBatchOutput) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return -(output.log_probs if output.values is None else output.values).sum() / 50, {}


def step(trainer: Any, rollout_id: int = 0, loss: Any = loss_fn) -> dict[str, float]:
    data = trainer_jobs.batch()
    data.rollout_id = rollout_id
    return dict(trainer.train_step(data, MICRO_BATCHES, loss).metrics)


def log_probs(trainer: Any, role: Any = "actor") -> list[torch.Tensor]:
    found: list[torch.Tensor] = trainer.log_probs(trainer_jobs.batch(), MICRO_BATCHES, role=role)
    return found


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in trainer.named_weights()}


def equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))
