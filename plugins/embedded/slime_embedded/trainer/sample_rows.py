"""The samples of one micro-batch, checked and laid end to end: what both trainers start a forward pass from.

Called by `embedded.microbatch` and `megatron.packed`. A response token at place `t` is predicted by the hidden state at
`t - 1`; `rows` are those predecessors, so that only they go through the output layer. The target of a row is always the
next token of its own sample, because the first response token has at least one prompt token before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from slime_core.errors import TrainError, rollout_name
from slime_core.sample import TrainBatch


@dataclass(frozen=True)
class SampleRows:
    """T tokens of n samples with R response tokens."""

    positions: list[int]
    """[n] places of the samples in the batch."""
    token_ids: np.ndarray
    """[T] int64."""
    lengths: list[int]
    """[n] of the T tokens in each sample."""
    response_lengths: list[int]
    """[n]; they sum to R."""
    rows: np.ndarray
    """[R] which of the T rows predict a response token, sample by sample."""
    targets: np.ndarray
    """[R] int64 response tokens."""
    kept: tuple[np.ndarray, np.ndarray] | None = None
    """[N] ids and [R + 1] offsets of a `SamplingMask`, int64; None where the batch has none."""


def read_samples(batch: TrainBatch, positions: Sequence[int], vocab_size: int, every_token: bool = True) -> SampleRows:
    """Lay the samples at `positions` end to end.

    `every_token`: with their last ones, from which nothing is predicted. One that has no other keeps it.

    Raises:
        TrainError: There is no sample, or one has no prompt token or a token id outside the vocabulary.
    """
    positions = list(positions)
    if not positions:
        raise TrainError(f"{rollout_name(batch.rollout_id)}: a micro-batch without samples")
    lengths = [len(batch.tokens[i]) for i in positions]
    responses = [batch.response_lengths[i] for i in positions]
    for i, length, response in zip(positions, lengths, responses, strict=True):
        if not 0 <= response < length:
            raise TrainError(
                f"sample {batch.sample_indices[i]} of {rollout_name(batch.rollout_id)}: response_length {response} with"
                f" {length} tokens; at least one prompt token must come before the response"
            )
    ids = np.fromiter(chain.from_iterable(batch.tokens[i] for i in positions), np.int64, sum(lengths))
    if ids.min() < 0 or ids.max() >= vocab_size:
        _raise_foreign_token(batch, positions, vocab_size)
    ends, counts = np.cumsum(lengths), np.asarray(responses)
    before = np.cumsum(counts) - counts
    rows = np.repeat(ends - counts - 1 - before, counts) + np.arange(counts.sum())
    targets = ids[rows + 1]
    if not every_token:
        cut = np.asarray(lengths) > 1
        lengths, ids = (lengths - cut).tolist(), np.delete(ids, ends[cut] - 1)
        rows -= np.repeat(np.cumsum(cut) - cut, counts)
    return SampleRows(positions, ids, lengths, responses, rows, targets, _kept(batch, positions))


def _kept(batch: TrainBatch, positions: list[int]) -> tuple[np.ndarray, np.ndarray] | None:
    ids, offsets = batch.rollout_top_p_token_ids, batch.rollout_top_p_token_offsets
    if ids is None or offsets is None:
        return None
    counts = np.concatenate([np.diff(offsets[i]) for i in positions])
    flat = np.fromiter(chain.from_iterable(ids[i] for i in positions), np.int64)
    return flat, np.concatenate([[0], np.cumsum(counts)])


def left_out(batch: TrainBatch, micro_batches: Sequence[Sequence[int]]) -> None:
    """Raises TrainError when a sample of the batch is in no micro-batch, so that it would get no result."""
    missing = sorted(set(range(len(batch))).difference(chain.from_iterable(micro_batches)))
    if missing:
        raise TrainError(f"{rollout_name(batch.rollout_id)}: samples at {missing[:10]} are in no micro-batch")


def _raise_foreign_token(batch: TrainBatch, positions: list[int], vocab_size: int) -> None:
    for i in positions:
        wrong = [t for t in batch.tokens[i] if not 0 <= t < vocab_size]
        if wrong:
            raise TrainError(
                f"sample {batch.sample_indices[i]} of {rollout_name(batch.rollout_id)}: token id {wrong[0]} is outside"
                f" the model's vocabulary of {vocab_size}; is the tokenizer that of --hf-checkpoint, and the"
                " vocabulary of --opd-teacher-load or --ref-load the same?"
            )
