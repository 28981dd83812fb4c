"""The hook after the steps: columns come when they are asked for, those alone, from all ranks."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from slime_core.learning.report import TrainedRollout, save_trained
from slime_core.learning.tensors import TrainTensors, to_column
from slime_core.sample import TrainBatch
from tests.batches import train_batch
from tests.toy_trainer import Ranks, ToyTrainer, learn, make_args, make_batch

torch.set_num_threads(1)


class Counts(ToyTrainer):
    """Notes the shape of everything that is summed over ranks."""

    def __init__(self, rank: int, ranks: Ranks) -> None:
        super().__init__(rank, ranks)
        self.summed: list[tuple[int, ...]] = []

    def all_reduce(self, values: torch.Tensor) -> torch.Tensor:
        self.summed.append(tuple(values.shape))
        return super().all_reduce(values)


def test_nothing_is_gathered_unless_it_is_read() -> None:
    tokens = sum(make_batch().response_lengths)
    for told in (None, lambda args, trained: trained.batch.rewards):
        _, trainer = learn(make_args(), make_batch(), 2, trainer=Counts, on_trained=told)
        assert isinstance(trainer, Counts)
        assert not [shape for shape in trainer.summed if shape[-1:] == (tokens,)]


@pytest.mark.parametrize("world_size", [1, 2])
def test_rows_come_from_all_ranks(world_size: int) -> None:
    found: dict[int, list[dict[str, Any]]] = {}

    def told(args: Any, trained: Any) -> None:
        found[trained.trainer.rank] = trained.rows("advantages", "log_probs", "rewards", "no_such_column")

    batch = make_batch()
    _, trainer = learn(make_args(), batch, world_size, trainer=Counts, on_trained=told)
    assert isinstance(trainer, Counts)
    assert trainer.summed.count((2, sum(batch.response_lengths))) == 1
    rows = found.pop(0)
    assert all(other == [] for other in found.values())
    assert {name for row in rows for name in row} == {
        "rollout_id", "sample_indices", "rewards", "advantages", "log_probs",
    }  # fmt: skip
    assert [row["sample_indices"] for row in rows] == sorted(batch.sample_indices)
    for row in rows:
        at = batch.sample_indices.index(row["sample_indices"])
        assert row["advantages"] == pytest.approx([batch.rewards[at]] * batch.response_lengths[at])


LENGTHS = [2, 1, 3, 2]


class Trainer:
    device = torch.device("cpu")

    def __init__(self, rank: int, ranks: Ranks) -> None:
        self.rank, self.ranks = rank, ranks

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.ranks.sum(self.rank, tensor)


def _batch() -> TrainBatch:
    return train_batch(
        [[1] * n for n in LENGTHS], 2, rollout_id=5, rewards=[0.5, -0.5, 0.1, 0.2], raw_rewards=[1.0, 0.0, 0.5, 0.5],
        truncated=[0, 1, 0, 0], sample_indices=[7, 3, 9, 1], group_indices=[0, 0, 1, 1],
    )  # fmt: skip


def _column(indices: list[int], offset: float) -> list[torch.Tensor]:
    rows = [[offset + i + t / 7 for t in range(LENGTHS[i])] for i in indices]
    return to_column(rows, torch.device("cpu"))


def _write(template: str, shares: list[list[int]]) -> None:
    ranks = Ranks(len(shares))

    def one(rank: int) -> None:
        share = shares[rank]
        tensors = TrainTensors(
            loss_masks=_column(share, 0), advantages=_column(share, 100), old_log_probs=[torch.zeros(0)] * len(share)
        )
        trainer: Any = Trainer(rank, ranks)
        known = dict(enumerate(_column(share, -50)))
        batch = _batch()
        save_trained(template, TrainedRollout(trainer, batch, batch.select(share), share, tensors, [], known))

    with ThreadPoolExecutor(len(shares)) as pool:
        list(pool.map(one, range(len(shares))))


def test_one_line_per_sample_sorted_by_index_whatever_the_ranks(tmp_path: Path) -> None:
    _write(str(tmp_path / "two_{rollout_id}.jsonl"), [[2, 0], [3, 1]])
    _write(str(tmp_path / "one_{rollout_id}.jsonl"), [[0, 1, 2, 3]])
    text = (tmp_path / "two_5.jsonl").read_text()
    assert text == (tmp_path / "one_5.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    assert [row["sample_indices"] for row in rows] == [1, 3, 7, 9]
    first = rows[2]
    assert first["rollout_id"] == 5
    assert first["loss_masks"] == [1, 1]  # the batch's, not the trainer's copy
    assert torch.equal(torch.tensor(first["advantages"]), torch.tensor([100.0, 100 + 1 / 7]))
    assert torch.equal(torch.tensor(first["log_probs"]), torch.tensor([-50.0, -50 + 1 / 7]))
    assert (first["rewards"], first["raw_reward"], first["total_lengths"]) == (0.5, 1.0, 4)
    assert "old_log_probs" not in first  # not known for every sample
