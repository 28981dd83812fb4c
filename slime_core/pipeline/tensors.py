"""One rank's share of a `TrainBatch` as tensors: a [response_length] tensor per sample and column.

Made by the learner, read by the advantage and loss stages. What a reader would get wrong: the tensors of one column
are views of a single one, so moving a column to a device is one copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from slime_core.ops.masking import per_rollout_weights, per_token_weights
from slime_core.types import TrainBatch

Column = list[torch.Tensor]


@dataclass
class TrainTensors:
    """Lists with one float32 tensor of [response_length] per sample of the rank's local batch."""

    loss_masks: Column
    rollout_log_probs: Column | None = None
    """Of the engine that sampled the tokens."""
    old_log_probs: Column | None = None
    """Of the policy at the start of the update; None or empty tensors where the first step reuses its own."""
    ref_log_probs: Column | None = None
    teacher_log_probs: Column | None = None
    kl: Column | None = None
    """Estimate of KL(old || reference)."""
    advantages: Column | None = None
    returns: Column | None = None

    @classmethod
    def from_batch(cls, batch: TrainBatch, device: torch.device) -> TrainTensors:
        """The columns the rollout brought."""

        def column(rows: Sequence[Sequence[float]] | None) -> Column | None:
            return None if rows is None else to_column(rows, device)

        masks = to_column(batch.loss_masks, device)
        return cls(masks, column(batch.rollout_log_probs), teacher_log_probs=column(batch.teacher_log_probs))


def to_column(rows: Sequence[Sequence[float]], device: torch.device) -> Column:
    """Lists of numbers -> float32 tensors on `device`."""
    flat = torch.tensor([value for row in rows for value in row], dtype=torch.float32)
    return list(torch.split(flat.to(device), [len(row) for row in rows]))


def gather(column: Column | None, positions: Sequence[int]) -> torch.Tensor | None:
    """The samples at `positions` laid end to end, [T]; None for an absent column."""
    return None if column is None else torch.cat([column[p] for p in positions])


@dataclass(frozen=True)
class Denominators:
    """What the sums of one optimizer step (or of the whole rollout) are divided by, over all ranks."""

    num_rollouts: int
    num_tokens: int
    """Unmasked response tokens."""
    per_token: bool = False
    """`--calculate-per-token-loss`: mean over tokens instead of over rollouts."""

    @classmethod
    def of(cls, batch: TrainBatch, samples: Sequence[int], *, per_token: bool) -> Denominators:
        """Those of `samples`, positions in the whole batch."""
        rollouts = {batch.rollout_ids[i] for i in samples}
        return cls(len(rollouts), sum(sum(batch.loss_masks[i]) for i in samples), per_token)

    def weights(self, batch: TrainBatch, positions: Sequence[int], mask: torch.Tensor) -> torch.Tensor:
        """[T] weight of each token of the samples at `positions` of the local `batch`.

        Summed over all micro-batches of all ranks, values times weights are the mean.
        """
        if self.per_token:
            return per_token_weights(mask, self.num_tokens)
        lengths = [batch.response_lengths[p] for p in positions]
        sums = [batch.rollout_mask_sums[p] for p in positions]
        return per_rollout_weights(mask, lengths, sums, self.num_rollouts)
