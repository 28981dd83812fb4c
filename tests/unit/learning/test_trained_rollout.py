"""The hook after the steps: columns come when they are asked for, those alone, from all ranks."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from slime_core.estimator import EstimatorBase
from slime_core.learning.learner import Learner
from slime_core.learning.loss import PolicyLoss
from tests.toy_trainer import Ranks, ToyTrainer, make_args, make_batch

torch.set_num_threads(1)


class Counts(ToyTrainer):
    """Notes the shape of everything that is summed over ranks."""

    def __init__(self, rank: int, ranks: Ranks) -> None:
        super().__init__(rank, ranks)
        self.summed: list[tuple[int, ...]] = []

    def all_reduce(self, values: torch.Tensor) -> torch.Tensor:
        self.summed.append(tuple(values.shape))
        return super().all_reduce(values)


def train(told: Any, world_size: int = 2, **settings: Any) -> list[Counts]:
    args, ranks = make_args(**settings), Ranks(world_size)
    trainers = [Counts(rank, ranks) for rank in range(world_size)]

    def work(trainer: Counts) -> None:
        estimator = EstimatorBase(args)
        Learner(args, trainer, estimator, PolicyLoss(args, estimator), on_trained=told).train(0, make_batch())

    with ThreadPoolExecutor(world_size) as pool:
        list(pool.map(work, trainers))
    return trainers


def test_nothing_is_gathered_for_nobody() -> None:
    tokens = sum(make_batch().response_lengths)
    looks = train(lambda args, trained: trained.batch.rewards)
    for trainers in (train(None), looks):
        assert not [shape for each in trainers for shape in each.summed if shape[-1:] == (tokens,)]


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_is_asked_for_comes_from_all_ranks(world_size: int) -> None:
    found: dict[int, list[dict[str, Any]]] = {}

    def told(args: Any, trained: Any) -> None:
        found[trained.trainer.rank] = trained.rows("advantages", "log_probs", "rewards", "no_such_column")

    trainers, batch = train(told, world_size), make_batch()
    assert trainers[0].summed.count((2, sum(batch.response_lengths))) == 1
    rows = found.pop(0)
    assert all(other == [] for other in found.values())
    assert {name for row in rows for name in row} == {
        "rollout_id", "sample_indices", "rewards", "advantages", "log_probs",
    }  # fmt: skip
    assert [row["sample_indices"] for row in rows] == sorted(batch.sample_indices)
    for row in rows:
        at = batch.sample_indices.index(row["sample_indices"])
        assert row["advantages"] == pytest.approx([batch.rewards[at]] * batch.response_lengths[at])
