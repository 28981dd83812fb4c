"""`protocols.Trainer` in a page of code, for tests of the learner: a bigram model, in threads for ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import torch
from slime_embedded.models.logprobs import log_probs_from_logits

from slime_core.config import Args
from slime_core.estimator import EstimatorBase
from slime_core.learning.learner import Learner
from slime_core.learning.loss import PolicyLoss
from slime_core.protocols import LossFn, MicroBatchOutput, StepResult
from slime_core.sample import TrainBatch
from tests.batches import train_batch

VOCAB = 11


class Ranks:
    """Data-parallel ranks as threads."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=60)
        self.slots: list[torch.Tensor | None] = [None] * size

    def sum(self, rank: int, tensor: torch.Tensor) -> torch.Tensor:
        self.slots[rank] = tensor
        self.barrier.wait()
        total = torch.stack([slot for slot in self.slots if slot is not None]).sum(0)
        self.barrier.wait()
        return total


class ToyTrainer:
    """`protocols.Trainer` over a bigram model in float64, plain gradient descent; a critic is a value per token."""

    def __init__(self, rank: int = 0, ranks: Ranks | None = None, lr: float = 1.0, role: str = "actor") -> None:
        self.rank = rank
        self.role = role
        self.ranks = ranks or Ranks(1)
        self.world_size = self.ranks.size
        self.device = torch.device("cpu")
        self.lr = lr
        generator = torch.Generator().manual_seed(0)
        shape = (VOCAB, VOCAB) if role == "actor" else (VOCAB,)
        self.weight = torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        self.reference, self.teacher = (torch.randn(shape, generator=generator).double() for _ in range(2))
        self.old_actor = self.weight.detach().clone()
        self.calls: list[str] = []
        self.forced: dict[str, float] = {}

    def _rows(self, batch: TrainBatch, positions: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of the concatenated tokens that predict a response token, and those tokens."""
        rows, targets, end = [], [], 0
        for p in positions:
            tokens, length = batch.tokens[p], batch.response_lengths[p]
            end += len(tokens)
            rows += range(end - length - 1, end - 1)
            targets += tokens[-length:]
        return torch.tensor(rows), torch.tensor(targets)

    def output(
        self, weight: torch.Tensor, batch: TrainBatch, positions: Sequence[int], with_logits: bool = False
    ) -> MicroBatchOutput:
        """The forward pass."""
        tokens = torch.tensor([t for p in positions for t in batch.tokens[p]])
        rows, targets = self._rows(batch, positions)
        if self.role == "critic":
            return MicroBatchOutput(list(positions), weight.new_empty(0), values=weight[tokens][rows])
        logits = weight.T[tokens]
        log_probs, entropy = log_probs_from_logits(logits[rows], targets, with_entropy=True)
        return MicroBatchOutput(list(positions), log_probs, entropy, logits=logits[None] if with_logits else None)

    def _over(self, weight: torch.Tensor, batch: TrainBatch, micro_batches: Any, field: str) -> list[torch.Tensor]:
        found: dict[int, torch.Tensor] = {}
        with torch.no_grad():
            for positions in micro_batches:
                values = getattr(self.output(weight, batch, positions), field)
                found.update(zip(positions, values.split([batch.response_lengths[p] for p in positions])))
        return [found[p].float() for p in range(len(batch))]

    def log_probs(
        self,
        batch: TrainBatch,
        micro_batches: Sequence[Sequence[int]],
        *,
        role: Literal["actor", "ref", "teacher", "old_actor"] = "actor",
    ) -> list[torch.Tensor]:
        self.calls.append(f"log_probs {role} {len(batch)}")
        frozen = {"ref": self.reference, "teacher": self.teacher, "old_actor": self.old_actor}
        weight = self.weight if role == "actor" else frozen[role]
        return self._over(weight, batch, micro_batches, "log_probs")

    def over_logits(
        self, batch: TrainBatch, micro_batches: Sequence[Sequence[int]], read: Callable[..., Any], *, role: str
    ) -> list[list[torch.Tensor]]:
        self.calls.append(f"over_logits {role}")
        weight = (self.weight if role == "actor" else self.teacher).detach()
        found = []
        for p in range(len(batch)):
            rows, targets = self._rows(batch, [p])
            found.append(read(weight.T[torch.tensor(batch.tokens[p])][rows], targets))
        return [list(column) for column in zip(*found)]

    def log_probs_and_entropy(
        self, batch: TrainBatch, micro_batches: Sequence[Sequence[int]]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        self.calls.append(f"log_probs_and_entropy {len(batch)}")
        columns = [self._over(self.weight, batch, micro_batches, field) for field in ("log_probs", "entropy")]
        return columns[0], columns[1]

    def values(self, batch: TrainBatch, micro_batches: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        self.calls.append(f"values {len(batch)}")
        return self._over(self.weight, batch, micro_batches, "values")

    def train_step(
        self,
        batch: TrainBatch,
        micro_batches: Sequence[Sequence[int]],
        loss_fn: LossFn,
        *,
        with_entropy: bool = False,
        with_logits: bool = False,
    ) -> StepResult:
        self.calls.append("train_step")
        gradient, sums, log_probs = torch.zeros_like(self.weight), {}, {}
        for positions in micro_batches:
            output = self.output(self.weight, batch, positions, with_logits)
            output.entropy = output.entropy if with_entropy else None
            if self.role == "actor":
                parts = output.log_probs.detach().split([batch.response_lengths[p] for p in positions])
                log_probs.update(zip(positions, parts))
            loss, metrics = loss_fn(output)
            gradient += torch.autograd.grad(loss, self.weight)[0]
            for name, value in metrics.items():
                sums[name] = sums.get(name, torch.zeros(())) + value.double()
        gradient = self.all_reduce(gradient)
        totals = self.all_reduce(torch.stack(list(sums.values()))).tolist()
        with torch.no_grad():
            self.weight -= self.lr * gradient
        metrics = {**dict(zip(sums, totals)), "grad_norm": gradient.norm().item(), "lr": self.lr, **self.forced}
        return StepResult(metrics, log_probs)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.ranks.sum(self.rank, tensor)

    def broadcast(self, payload: bytes | None) -> bytes:
        assert payload is not None
        return payload

    def named_weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        return [("weight", self.weight.detach())]

    def update_reference(self) -> None:
        self.calls.append("update_reference")
        self.reference = self.weight.detach().clone()

    def update_old_actor(self) -> None:
        self.calls.append("update_old_actor")
        self.old_actor = self.weight.detach().clone()

    def save(self, directory: Path) -> None:
        torch.save(self.weight, directory / "weight.pt")

    def load(self, directory: Path) -> None:
        self.weight = torch.load(directory / "weight.pt")

    def close(self) -> None:
        self.calls.append("close")


def make_args(**changes: Any) -> Args:
    values = {
        "advantage_estimator": "base",
        "eps_clip_high": 0.28,
        "global_batch_size": 8,
        "kl_loss_type": "k3",
        "micro_batch_size": 2,
    }
    return Args(**{**values, **changes})


def make_batch(rows: int = 8, *, shift: float = 0.0, siblings: bool = False, seed: int = 1) -> TrainBatch:
    """Random responses; engine log-probs are those of the toy model at the start, plus `shift`."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, size: int) -> list[int]:
        return torch.randint(low, high, (size,), generator=generator).tolist()

    lengths = draw(1, 7, rows)
    masks = [[1, *draw(0, 2, n - 1)] for n in lengths]
    tokens = [draw(0, VOCAB, n + 2) for n in lengths]
    ids = [i // 2 for i in range(rows)] if siblings else list(range(rows))
    rewards = torch.randn(rows, generator=generator).tolist()
    columns = {"rewards": rewards, "sample_indices": [100 + i for i in range(rows)], "rollout_ids": ids}
    batch = train_batch(masks, tokens=tokens, **columns)
    exact = ToyTrainer().log_probs(batch, [list(range(rows))])
    batch.rollout_log_probs = [(part + shift).tolist() for part in exact]
    return batch


def learn(
    args: Any,
    batch: TrainBatch,
    world_size: int = 1,
    estimator: Callable[[Any], Any] = EstimatorBase,
    loss: Callable[[Any, Any], Any] = PolicyLoss,
    *,
    trainer: Callable[[int, Ranks], ToyTrainer] = ToyTrainer,
    **given: Any,
) -> tuple[dict[str, float], ToyTrainer]:
    """Train once on all ranks; return rank 0's metrics but times, and its trainer, after checking that all agree."""
    ranks = Ranks(world_size)
    trainers = [trainer(rank, ranks) for rank in range(world_size)]

    def work(own: ToyTrainer) -> dict[str, float]:
        chosen = estimator(args)
        metrics = Learner(args, own, chosen, loss(args, chosen), **given).train(batch.rollout_id, batch)
        return {name: value for name, value in metrics.items() if not name.startswith("perf/")}

    with ThreadPoolExecutor(world_size) as pool:
        found = list(pool.map(work, trainers))
    assert all(metrics == found[0] for metrics in found)
    assert all(torch.equal(own.weight, trainers[0].weight) for own in trainers)
    return found[0], trainers[0]
