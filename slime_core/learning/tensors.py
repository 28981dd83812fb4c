"""A rank's share of a `TrainBatch` as tensors: a [response_length] tensor per sample and column.

The learner makes them; the advantage and loss stages read them. The tensors of a column are views of a single tensor,
so moving a column to a device is one copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from slime_core.ops.masking import AllReduce, per_rollout_weights, per_token_weights
from slime_core.sample import NOT_SAMPLED, TrainBatch

Column = list[torch.Tensor]


@dataclass
class TrainTensors:
    """Lists with one float32 tensor of [response_length] per sample of the rank's local batch."""

    loss_masks: Column
    rollout_log_probs: Column | None = None
    """Log-probs of the engine that sampled the tokens."""
    old_log_probs: Column | None = None
    """Log-probs of the policy at the start of the update; None or empty tensors if the first step reuses its own."""
    ref_log_probs: Column | None = None
    teacher_log_probs: Column | None = None
    train_log_probs: Column | None = None
    """Log-probs of the trainer, if `old_log_probs` are the engine's and both are compared."""
    staleness: Column | None = None
    """Weight versions between sampling and this update; 0 where not sampled; None when all tokens are fresh."""
    entropy: Column | None = None
    """Entropy of the policy at the start of the update, with `--use-rollout-entropy`."""
    values: Column | None = None
    """Values of the critic at the start of the update."""
    kl: Column | None = None
    """Estimate of KL(old || reference)."""
    opd_reverse_kl: Column | None = None
    """Old minus teacher log-probs, 0 where masked: the estimate of KL(old || teacher) that distillation lowers."""
    advantages: Column | None = None
    returns: Column | None = None

    @classmethod
    def from_batch(cls, batch: TrainBatch, device: torch.device) -> TrainTensors:
        """Return the columns that come from the rollout, on `device`."""

        def column(rows: Sequence[Sequence[float]] | None) -> Column | None:
            return None if rows is None else to_column(rows, device)

        masks = to_column(batch.loss_masks, device)
        return cls(
            masks,
            column(batch.rollout_log_probs),
            teacher_log_probs=column(batch.teacher_log_probs),
            staleness=column(_staleness(batch)),
        )


def _staleness(batch: TrainBatch) -> list[list[int]] | None:
    if batch.token_weight_versions is None:
        return None
    newest = batch.weight_version
    return [
        [0 if version == NOT_SAMPLED else max(newest - version, 0) for version in row]
        for row in batch.token_weight_versions
    ]


def to_column(rows: Sequence[Sequence[float]], device: torch.device) -> Column:
    """Convert lists of numbers to float32 tensors on `device`."""
    flat = torch.tensor([value for row in rows for value in row], dtype=torch.float32)
    return list(torch.split(flat.to(device), [len(row) for row in rows]))


def gather(column: Column | None, positions: Sequence[int]) -> torch.Tensor | None:
    """Return the samples at `positions` concatenated, [T]; None for an absent column."""
    return None if column is None else torch.cat([column[p] for p in positions])


@dataclass(frozen=True)
class Denominators:
    """Denominators for the sums of one optimizer step (or of the whole rollout) over all ranks."""

    num_rollouts: int
    num_tokens: int
    """Unmasked response tokens."""
    per_token: bool = False
    """`--calculate-per-token-loss`: mean over tokens instead of over rollouts."""
    positions: tuple[int, ...] = ()
    """Samples of the step in this rank's local batch."""
    all_reduce: AllReduce | None = None
    """Sum over ranks, for denominators that a loss takes over the step itself."""

    @property
    def total(self) -> int:
        """Denominator of a plain sum over the step's tokens: the number of tokens, or of rollouts."""
        return max(self.num_tokens if self.per_token else self.num_rollouts, 1)

    @classmethod
    def of(cls, batch: TrainBatch, samples: Sequence[int], *, per_token: bool) -> Denominators:
        """Return the denominators of `samples`, positions in the whole batch."""
        rollouts = {batch.rollout_ids[i] for i in samples}
        return cls(len(rollouts), sum(sum(batch.loss_masks[i]) for i in samples), per_token)

    def weights(self, batch: TrainBatch, positions: Sequence[int], mask: torch.Tensor) -> torch.Tensor:
        """Return [T] weights of the tokens of the samples at `positions` of the local `batch`.

        The sum of values times weights, over all micro-batches of all ranks, is the mean.
        """
        if self.per_token:
            return per_token_weights(mask, self.num_tokens)
        lengths = [batch.response_lengths[p] for p in positions]
        sums = [batch.rollout_mask_sums[p] for p in positions]
        return per_rollout_weights(mask, lengths, sums, self.num_rollouts)
