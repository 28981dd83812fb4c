"""A training batch of samples that differ only in what a test says, and an optimizer step over one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from slime_core.learning.loss import Loss
from slime_core.learning.tensors import Denominators, TrainTensors
from slime_core.protocols import MicroBatchOutput
from slime_core.sample import TrainBatch


def train_batch(masks: Sequence[Sequence[int]], prompt: int = 1, **columns: Any) -> TrainBatch:
    """One sample per loss mask, behind `prompt` tokens; `columns` take the place of what follows from the masks."""
    n, lengths = len(masks), [len(mask) for mask in masks]
    ids, rewards = columns.get("rollout_ids", list(range(n))), columns.get("rewards", [0.0] * n)
    of_rollout = {i: sum(sum(mask) for mask, other in zip(masks, ids, strict=True) if other == i) for i in ids}
    given: dict[str, Any] = {
        "rollout_id": 0, "tokens": [[0] * (length + prompt) for length in lengths], "response_lengths": lengths,
        "loss_masks": [list(mask) for mask in masks], "rewards": rewards, "raw_rewards": rewards, "truncated": [0] * n,
        "sample_indices": list(range(n)), "group_indices": [0] * n, "rollout_ids": ids,
        "rollout_mask_sums": [of_rollout[i] for i in ids],
    }  # fmt: skip
    return TrainBatch(**given | columns)


class LossStep:
    """One optimizer step of random columns; float64 so that splits can be compared to rounding."""

    def __init__(self, masks: Sequence[Sequence[int]], rollout_ids: Sequence[int] | None = None, seed: int = 0) -> None:
        self.masks = [list(mask) for mask in masks]
        ids = list(rollout_ids or range(len(self.masks)))
        self.batch = train_batch(self.masks, 2, rollout_id=7, rollout_ids=ids)
        generator = torch.Generator().manual_seed(seed)

        def column(scale: float = 0.3) -> list[torch.Tensor]:
            return [torch.randn(len(m), generator=generator, dtype=torch.float64) * scale - 1 for m in self.masks]

        self.log_probs = [part.requires_grad_() for part in column()]
        self.tensors = TrainTensors(
            loss_masks=[torch.tensor(mask, dtype=torch.float64) for mask in self.masks],
            rollout_log_probs=column(), old_log_probs=column(), advantages=column(1.0), ref_log_probs=column(),
        )  # fmt: skip
        self.entropy = [part.requires_grad_() for part in column(1.0)]
        self.leaves = [*self.log_probs, *self.entropy]

    def denominators(self, per_token: bool = False) -> Denominators:
        n = len(self.batch)
        counts = Denominators.of(self.batch, range(n), per_token=per_token)
        return replace(counts, positions=tuple(range(n)), all_reduce=lambda tensor: tensor)

    def run(
        self, loss: Loss, splits: Sequence[Sequence[int]] | None = None, per_token: bool = False
    ) -> tuple[dict[str, float], list[torch.Tensor]]:
        """Return metrics, and gradients of log-probs and entropies, summed over the micro-batches."""
        function = loss.bind(self.batch, self.tensors, self.denominators(per_token))
        totals: dict[str, float] = {}
        gradients = [torch.zeros_like(leaf) for leaf in self.leaves]
        for positions in splits or [range(len(self.batch))]:
            log_probs, entropy = (torch.cat([part[p] for p in positions]) for part in (self.log_probs, self.entropy))
            scalar, metrics = function(MicroBatchOutput(list(positions), log_probs, entropy))
            assert not any(value.requires_grad for value in metrics.values())
            found = torch.autograd.grad(scalar, self.leaves, allow_unused=True)
            gradients = [g if f is None else g + f for g, f in zip(gradients, found, strict=True)]
            for name, value in metrics.items():
                totals[name] = totals.get(name, 0.0) + value.item()
        return totals, gradients
