"""Samples of a `TrainBatch` -> this rank's packed tensors ("thd": all tokens in one row, with a list of boundaries).

`forward.py` calls it for every micro-batch. Under context parallelism each sample is padded to a multiple of 2 * cp and
cut into 2 * cp chunks, and rank r takes chunks r and 2 * cp - 1 - r of every sample. This zig-zag balances causal
attention; Transformer Engine and `attention.py` expect it. A last segment of padding, a separate sequence that is never
read, extends the row to the length that sequence parallelism and `--data-pad-size-multiplier` require.

    cp = 2, lengths 5 and 3, multiple 1                          rank 0           rank 1
    sample 0  a0 a1 | a2 a3 | a4 .  | .  .                       a0 a1 .  .       a2 a3 a4 .
    sample 1  b0 | b1 | b2 | .                                   b0 .             b1 b2

The target of a row is the next token of the whole sample, which another rank may hold. Targets are therefore taken
before the cut, and a rank's rows are not in the order of the response. `places` has the position of each row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from slime_embedded.models.logprobs import SamplingMask
from slime_embedded.trainer.sample_rows import SampleRows, read_samples

from slime_core.sample import TrainBatch

PAD_TOKEN = 0


@dataclass(frozen=True)
class Packing:
    """The padding of rows, and this rank's part of them."""

    context_rank: int = 0
    context_size: int = 1
    multiple: int = 1
    """Divisor of this rank's padded token count: tensor-parallel size x `--data-pad-size-multiplier`."""
    least: int = 0
    """Minimum of this rank's padded token count."""

    def __post_init__(self) -> None:
        assert 0 <= self.context_rank < self.context_size
        assert self.multiple > 0

    @property
    def chunks(self) -> int:
        """Number of parts into which every sequence is cut, over all ranks."""
        return 2 * self.context_size if self.context_size > 1 else 1

    def padded(self, length: int) -> int:
        """Return the length of a sequence, padded so that it can be cut."""
        return math.ceil(length / self.chunks) * self.chunks

    def own(self, padded: int) -> np.ndarray:
        """Return the indices of this rank's tokens in a padded sequence, [padded / cp], in the rank's order."""
        if self.context_size == 1:
            return np.arange(padded)
        chunk = padded // self.chunks
        first, second = self.context_rank * chunk, (self.chunks - 1 - self.context_rank) * chunk
        return np.concatenate([np.arange(first, first + chunk), np.arange(second, second + chunk)])

    def filler(self, padded_total: int) -> int:
        """Return the length of the padding segment over all ranks, so that each rank has a multiple of `multiple`."""
        # A segment is cut in two on each rank, so its part there must be even.
        multiple = math.lcm(self.multiple, 2) if self.context_size > 1 else self.multiple
        here = padded_total // self.context_size
        wanted = max(math.ceil(max(here, self.least) / multiple), 1) * multiple
        return (wanted - here) * self.context_size


@dataclass(frozen=True)
class PackedBatch:
    """T tokens on this rank of n samples, L tokens and R response tokens over all context-parallel ranks."""

    positions: list[int]
    """Positions of the samples in the batch, [n]; empty for an idle micro-batch."""
    lengths: list[int]
    """Token count of each sample, prompt included, [n]; the sum is L."""
    response_lengths: list[int]
    """Response length of each sample, [n]; the sum is R."""
    token_ids: torch.Tensor
    """Token ids, [1, T] int64."""
    position_ids: torch.Tensor
    """Position ids, [1, T] int64, from 0 in every segment."""
    padding: torch.Tensor
    """Padding mask, [1, T] bool; True for tokens of no sample."""
    boundaries: torch.Tensor
    """Start of each padded segment, in tokens over all context-parallel ranks, [segments + 1] int32."""
    longest: int
    """Number of tokens in the longest padded segment."""
    rows: torch.Tensor
    """Rows that predict a response token, [R on this rank] int64 in [0, T)."""
    targets: torch.Tensor
    """Token that each of `rows` predicts, [R on this rank] int64."""
    places: torch.Tensor
    """Position of each of `rows` in the concatenated responses, [R on this rank] int64 in [0, R)."""
    token_rows: torch.Tensor
    """Rows of samples' tokens, without padding, [L on this rank] int64 in [0, T)."""
    token_places: torch.Tensor
    """Position of each of `token_rows` in the concatenated samples, [L on this rank] int64 in [0, L)."""
    mask: SamplingMask | None = None
    """Tokens among which the targets were sampled; None: all tokens."""
    routing: Any = None
    """`MicroRouting` of `routing.py`, if the pass replays experts."""

    @property
    def num_responses(self) -> int:
        """R, the number of response tokens over all context-parallel ranks."""
        return sum(self.response_lengths)

    @property
    def num_tokens(self) -> int:
        """L, the number of samples' tokens over all context-parallel ranks."""
        return sum(self.lengths)

    def sequence_params(self) -> Any:
        """Return Megatron's `PackedSeqParams` with the routing attached, so that every layer gets it with its input.

        Padding at the end of a sample counts as its tokens: under a causal mask no real token attends to it.
        """
        from megatron.core.packed_seq_params import PackedSeqParams

        params: Any = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=self.boundaries,
            cu_seqlens_kv=self.boundaries,
            cu_seqlens_q_padded=self.boundaries,
            cu_seqlens_kv_padded=self.boundaries,
            max_seqlen_q=self.longest,
            max_seqlen_kv=self.longest,
        )
        params.routing = self.routing
        return params


def pack(
    batch: TrainBatch, positions: Sequence[int], vocab_size: int, packing: Packing, device: torch.device
) -> PackedBatch:
    """Pack this rank's part of the samples at `positions`.

    Raises:
        TrainError: A sample has no prompt token, or a token id outside the vocabulary.
    """
    return _packed(read_samples(batch, positions, vocab_size), packing, device)


def pack_nothing(packing: Packing, device: torch.device) -> PackedBatch:
    """Return a micro-batch of padding only, for a rank that must take part in the other ranks' collectives."""
    nothing = np.empty(0, np.int64)
    return _packed(SampleRows([], nothing, [], [], nothing, nothing), packing, device)


def _packed(samples: SampleRows, packing: Packing, device: torch.device) -> PackedBatch:
    padded = [packing.padded(length) for length in samples.lengths]
    if filler := packing.filler(sum(padded)):
        padded.append(filler)
    # Position of each token of this rank: in its segment, and among all samples' tokens (-1: padding).
    within = [packing.own(length) for length in padded]
    starts = np.cumsum([0, *samples.lengths]).tolist()
    real = [*samples.lengths, 0][: len(padded)]
    sources = [np.where(own < n, own + at, -1) for own, n, at in zip(within, real, starts)]
    source = np.concatenate(sources)
    token_rows = np.flatnonzero(source >= 0)
    token_places = source[token_rows]
    # Position of each of the L tokens' prediction among the R response tokens (-1: no response token).
    response_place = np.full(len(samples.token_ids), -1)
    response_place[samples.rows] = np.arange(len(samples.rows))
    predicts = response_place[token_places] >= 0
    rows, places = token_rows[predicts], response_place[token_places][predicts]
    token_ids = np.full(len(source), PAD_TOKEN)
    token_ids[token_rows] = samples.token_ids[token_places]

    def tensor(array: np.ndarray, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.from_numpy(array).to(device=device, dtype=dtype)

    return PackedBatch(
        positions=samples.positions,
        lengths=samples.lengths,
        response_lengths=samples.response_lengths,
        token_ids=tensor(token_ids)[None],
        position_ids=tensor(np.concatenate(within))[None],
        padding=tensor(source < 0, torch.bool)[None],
        boundaries=tensor(np.cumsum([0, *padded]), torch.int32),
        longest=max(padded),
        rows=tensor(rows),
        targets=tensor(samples.targets[places]),
        places=tensor(places),
        token_rows=tensor(token_rows),
        token_places=tensor(token_places),
        mask=None if samples.kept is None else _mask_of(*samples.kept, places, device),
    )


def _mask_of(ids: np.ndarray, offsets: np.ndarray, places: np.ndarray, device: torch.device) -> SamplingMask:
    """Return the sampling mask of the response tokens at `places`, in the same order."""
    counts = np.diff(offsets)[places]
    ends = np.cumsum(counts)
    chosen = np.repeat(offsets[:-1][places] - ends + counts, counts) + np.arange(counts.sum())
    return SamplingMask(torch.from_numpy(ids[chosen]).to(device), torch.from_numpy(np.concatenate([[0], ends])))
