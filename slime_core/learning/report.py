"""Report the training data of one rollout: `rollout/*` means, the log-prob gap, and one row per sample.

The learner calls it after the optimizer steps, with the data from before the steps. Token values are averaged like
THUDM/slime's metrics: a mean over rollouts of masked means, independent of the loss. The gap is a plain mean over
tokens. Both cover all ranks. Samples go to the hook `slime_rollout_trained` and to `--save-debug-train-data`. Their
columns are those of the batch, under the names of THUDM/slime's `rollout_data`, and those of the trainer (`log_probs`
from the start of the update, `advantages`, ...).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import torch

from slime_core.data.dumps import dump_path, to_json, write_lines
from slime_core.errors import rollout_name
from slime_core.learning.tensors import Column, Denominators, TrainTensors, gather
from slime_core.ops.masking import masked, weighted_sum
from slime_core.protocols import StepResult, Trainer
from slime_core.sample import TrainBatch
from slime_core.sample.types import sibling_counts, weighted_mean

GAP = "train/train_rollout_logprob_abs_diff"


def rollout_report(
    batch: TrainBatch, local: TrainBatch, tensors: TrainTensors, log_probs: Column | None, trainer: Trainer
) -> dict[str, float]:
    """Return the metrics `rollout/*` of the whole rollout, the same on every rank.

    Args:
        batch: The whole rollout.
        local: This rank's samples.
        tensors: Columns of this rank's samples.
        log_probs: Log-probs of the policy at the start of the update, if known.
        trainer: Trainer that sums over ranks.
    """
    of_rollout = "ref_log_probs rollout_log_probs advantages returns kl entropy values teacher_log_probs opd_reverse_kl"
    columns = {"log_probs": log_probs, **{name: getattr(tensors, name) for name in of_rollout.split()}}
    present = {name: column for name, column in columns.items() if column is not None}
    return {**_row_means(batch), **_token_means(batch, local, tensors, present, trainer)}


def _row_means(batch: TrainBatch) -> dict[str, float]:
    """Return means over rollouts of the means over their samples; rewards only over samples that are trained on."""
    trained = [i for i, mask in enumerate(batch.loss_masks) if any(mask)]
    among_trained = [1.0 / batch.sibling_counts[i] for i in trained]
    shares = [1.0 / count for count in sibling_counts(batch.rollout_ids)]
    return {
        "rollout/rewards": _mean([batch.rewards[i] for i in trained], among_trained),
        "rollout/raw_reward": _mean([batch.raw_rewards[i] for i in trained], among_trained),
        "rollout/response_lengths": _mean(batch.response_lengths, shares),
        "rollout/total_lengths": _mean([len(tokens) for tokens in batch.tokens], shares),
        "rollout/truncated": _mean(batch.truncated, shares),
        "rollout/masked_samples": math.fsum(s for s, mask in zip(shares, batch.loss_masks) if not any(mask)),
    }


def _mean(values: Sequence[float], shares: Sequence[float]) -> float:
    return weighted_mean(values, shares) if values else 0.0


def _token_means(
    batch: TrainBatch, local: TrainBatch, tensors: TrainTensors, columns: dict[str, Column], trainer: Trainer
) -> dict[str, float]:
    if not columns:
        return {}
    positions = range(len(local))
    mask = gather(tensors.loss_masks, positions)
    assert mask is not None
    weights = Denominators.of(batch, range(len(batch)), per_token=False).weights(local, positions, mask).double()
    sums = [weighted_sum(torch.cat(column).double(), weights) for column in columns.values()]
    totals = trainer.all_reduce(torch.stack(sums)).tolist()
    return {f"rollout/{name}": total for name, total in zip(columns, totals)}


def log_prob_gap(tensors: TrainTensors, log_probs: Mapping[int, torch.Tensor], trainer: Trainer) -> dict[str, float]:
    """Return mean and maximum of |trainer - engine| over the unmasked tokens of samples with log-probs, on all ranks.

    Args:
        tensors: Columns of this rank's samples.
        log_probs: Log-probs of the trainer before the update, by position in the local batch.
        trainer: Trainer that sums over ranks.
    """
    assert tensors.rollout_log_probs is not None
    # Slots 0 and 1: sum and count; then one slot per rank, so that a sum over ranks carries every rank's maximum.
    slots = torch.zeros(2 + trainer.world_size, dtype=torch.float64, device=trainer.device)
    if log_probs:
        theirs, masks = ([column[i] for i in log_probs] for column in (tensors.rollout_log_probs, tensors.loss_masks))
        mask = torch.cat(masks).double()
        gap = masked((torch.cat(list(log_probs.values())) - torch.cat(theirs)).abs().double(), mask)
        slots[0], slots[1], slots[2 + trainer.rank] = gap.sum(), mask.sum(), gap.max()
    total, count, *maxima = trainer.all_reduce(slots).tolist()
    return {GAP: total / max(count, 1.0), f"{GAP}_max": max(maxima)}


@dataclass(frozen=True)
class TrainedRollout:
    """A rollout after its optimizer steps, in one trainer process: the argument of the hook `slime_rollout_trained`."""

    trainer: Trainer
    """Trainer of the actor. It still holds the gradients of its last step."""
    batch: TrainBatch
    """The whole rollout, the same on every rank."""
    local: TrainBatch
    """This rank's samples."""
    indices: Sequence[int]
    """Positions of the samples of `local` in `batch`."""
    tensors: TrainTensors
    """Columns of this rank's samples, in the order of `indices`."""
    steps: Sequence[StepResult]
    """Results of the actor's optimizer steps."""
    known: Mapping[int, torch.Tensor]
    """Position in `local` -> the trainer's log-probs from before the update, [response_length], as far as known."""
    spans: Sequence[tuple[str, float, float]] = ()
    """Work of this process: (name, start, end) by `time.perf_counter`; names are `log_probs`, `actor_train`, ..."""

    @property
    def log_probs(self) -> Column | None:
        """Values of `known` if it has all samples, else None; all ranks agree, since each has samples in every step."""
        return [self.known[p] for p in range(len(self.local))] if len(self.known) == len(self.local) else None

    def rows(self, *names: str) -> list[dict[str, object]]:
        """Return one mapping per sample of all ranks, sorted by `sample_indices`, with the named columns that exist.

        Every process must call it with the same names, because it sums over ranks. Ranks other than 0 get no rows.
        The columns are those of `slime_train_data` and the trainer's `log_probs`; without names, all of them.
        """
        columns = {f.name: getattr(self.tensors, f.name) for f in fields(self.tensors)} | {"log_probs": self.log_probs}
        lengths = self.batch.response_lengths
        own = [lengths[i] for i in self.indices]
        whole = {n: column for n, column in columns.items() if (not names or n in names) and _is_whole(column, own)}
        table = _gathered(whole, self.indices, lengths, self.trainer)
        if self.trainer.rank:
            return []
        kept = {n: v for n, v in self.batch.to_rollout_data().items() if not names or n in (*names, "sample_indices")}
        order = sorted(range(len(self.batch)), key=self.batch.sample_indices.__getitem__)
        table |= {n: values for n, values in kept.items() if isinstance(values, list) and len(values) == len(order)}
        table = {"rollout_id": [self.batch.rollout_id] * len(self.batch), **table}
        return [dict(zip(table, row)) for row in zip(*([values[i] for i in order] for values in table.values()))]


def save_trained(path: str, trained: TrainedRollout) -> None:
    """Write the file of `--save-debug-train-data`; every rank calls it."""
    rollout_id = trained.batch.rollout_id
    rows = trained.rows()
    if not trained.trainer.rank:
        lines = (to_json(row, f"the train data of {rollout_name(rollout_id)}") for row in rows)
        write_lines(dump_path(path, rollout_id), lines)


def _is_whole(column: object, lengths: Sequence[int]) -> bool:
    """Return whether a column has one [response_length] tensor for every sample of this rank."""
    return isinstance(column, list) and [t.shape for t in column] == [(n,) for n in lengths]


def _gathered(
    columns: dict[str, Column], indices: Sequence[int], lengths: Sequence[int], trainer: Trainer
) -> dict[str, list[object]]:
    """Gather the columns of all ranks as float32 arrays, in the order of the whole batch.

    Each rank writes its samples into a tensor of zeros, so the sum over ranks has every rank's values bit for bit.
    """
    if not columns:
        return {}
    starts = [0, *itertools.accumulate(lengths)]
    table = torch.zeros(len(columns), starts[-1], dtype=torch.float32, device=trainer.device)
    own: object = slice(None)
    if list(indices) != list(range(len(lengths))):
        own = torch.cat([torch.arange(starts[i], starts[i + 1]) for i in indices]).to(trainer.device)
    for row, column in zip(table, columns.values()):
        row[own] = torch.cat(column).to(row)
    flat = trainer.all_reduce(table).cpu().numpy()
    return {name: [row[a:b] for a, b in itertools.pairwise(starts)] for name, row in zip(columns, flat)}
