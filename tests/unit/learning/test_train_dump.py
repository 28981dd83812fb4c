"""The train data of every rank in one file, whole and exact."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import torch

from slime_core.learning.report import TrainedRollout, save_trained
from slime_core.learning.tensors import TrainTensors, to_column
from slime_core.sample import TrainBatch
from tests.batches import train_batch

LENGTHS = [2, 1, 3, 2]


class Ranks:
    """Two trainers in two threads that can add."""

    def __init__(self, size: int) -> None:
        self.barrier, self.parts = Barrier(size), [torch.empty(0)] * size


class Trainer:
    device = torch.device("cpu")

    def __init__(self, rank: int, ranks: Ranks) -> None:
        self.rank, self.ranks = rank, ranks

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        self.ranks.parts[self.rank] = tensor
        self.ranks.barrier.wait(60)
        return sum(self.ranks.parts[1:], self.ranks.parts[0])


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
