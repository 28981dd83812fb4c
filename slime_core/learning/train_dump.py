"""What the optimizer was given, sample by sample: for the hook `slime_rollout_trained` and `--save-debug-train-data`.

The learner calls this on every data-parallel rank after a rollout's steps. Columns of the batch have the names of
THUDM/slime's `rollout_data`; token-level columns of the trainer (`log_probs`, `advantages`, `returns`, `kl`, ...) are
from before the first step. `log_probs` are the trainer's own at the start of the update, `rollout_log_probs` the
engine's.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import torch

from slime_core.data.dumps import dump_path, to_json, write_lines
from slime_core.learning.tensors import Column, TrainTensors
from slime_core.protocols import Args, Trainer
from slime_core.types import TrainBatch


def report_trained(
    args: Args,
    told: Callable[..., object] | None,
    batch: TrainBatch,
    indices: Sequence[int],
    tensors: TrainTensors,
    log_probs: Column | None,
    trainer: Trainer,
) -> None:
    """Gather the samples of all ranks and hand them on from rank 0; every rank calls it.

    Args:
        args: `save_debug_train_data` names the file.
        told: The hook, where a plugin has it.
        batch: The whole rollout, the same on every rank.
        indices: Positions in it of this rank's samples.
        tensors: Columns of this rank's samples, in that order.
        log_probs: Of the policy at the start of the update, where they are known for all samples.
        trainer: For the sum over ranks.
    """
    columns = {f.name: getattr(tensors, f.name) for f in fields(tensors)} | {"log_probs": log_probs}
    lengths = batch.response_lengths
    whole = {name: column for name, column in columns.items() if _is_whole(column, [lengths[i] for i in indices])}
    table = _gathered(whole, indices, lengths, trainer)
    if trainer.rank:
        return
    table |= {name: values for name, values in batch.to_rollout_data().items() if _is_column(values, len(batch))}
    order = sorted(range(len(batch)), key=lambda i: batch.sample_indices[i])
    rows = [{"rollout_id": batch.rollout_id, **{name: values[i] for name, values in table.items()}} for i in order]
    if told is not None:
        told(args=args, rollout_id=batch.rollout_id, rows=rows)
    if args.save_debug_train_data:
        lines = (to_json(row, f"the train data of rollout {batch.rollout_id}") for row in rows)
        write_lines(dump_path(args.save_debug_train_data, batch.rollout_id), lines)


def _is_column(values: Any, n: int) -> bool:
    return isinstance(values, list) and len(values) == n


def _is_whole(column: Any, lengths: Sequence[int]) -> bool:
    """One [response_length] tensor for every sample of this rank."""
    return isinstance(column, list) and [tuple(t.shape) for t in column] == [(n,) for n in lengths]


def _gathered(
    columns: dict[str, Column], indices: Sequence[int], lengths: Sequence[int], trainer: Trainer
) -> dict[str, list[Any]]:
    """Columns of one rank -> those of all ranks as arrays of float32, in the order of the whole batch.

    Each rank fills its samples into zeros, so that the sum over ranks is every rank's values, bit for bit.
    """
    if not columns:
        return {}
    starts = [0, *itertools.accumulate(lengths)]
    table = torch.zeros(len(columns), starts[-1], dtype=torch.float32, device=trainer.device)
    for row, column in zip(table, columns.values()):
        for index, values in zip(indices, column):
            row[starts[index] : starts[index + 1]] = values
    flat = trainer.all_reduce(table).cpu().numpy()
    spans = list(itertools.pairwise(starts))
    return {name: [row[a:b] for a, b in spans] for name, row in zip(columns, flat)}
