"""Samples of a `TrainBatch` -> this rank's packed tensors ("thd": all tokens in one row, boundaries beside it).

Called by `forward.py` for every micro-batch. Under context parallelism each sample is padded to a multiple of
2 * cp and cut into as many chunks, and rank r takes chunks r and 2 * cp - 1 - r of every sample (the zig-zag that
balances causal attention; Transformer Engine and `attention.py` expect it). A last segment of padding, a sequence of
its own that nobody reads, makes the row's length what sequence parallelism and `--data-pad-size-multiplier` ask for.

    cp = 2, lengths 5 and 3, multiple 1                          rank 0           rank 1
    sample 0  a0 a1 | a2 a3 | a4 .  | .  .                       a0 a1 .  .       a2 a3 a4 .
    sample 1  b0 | b1 | b2 | .                                   b0 .             b1 b2

The target of a row is the next token of the whole sample, which another rank may hold; so targets are taken before the
cut, and a rank's rows are not in the order of the response. `places` says where each belongs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from slime_core.ops import SamplingMask
from slime_core.trainers.sample_rows import SampleRows, read_samples
from slime_core.types import TrainBatch

PAD_TOKEN = 0


@dataclass(frozen=True)
class Packing:
    """How rows are padded and which part of them this rank has."""

    context_rank: int = 0
    context_size: int = 1
    multiple: int = 1
    """This rank's tokens are padded to a multiple of it: tensor-parallel size x `--data-pad-size-multiplier`."""
    least: int = 0
    """This rank's tokens are padded to so many at least."""

    def __post_init__(self) -> None:
        assert 0 <= self.context_rank < self.context_size
        assert self.multiple > 0

    @property
    def chunks(self) -> int:
        """Parts that every sequence is cut into over all ranks."""
        return 2 * self.context_size if self.context_size > 1 else 1

    def padded(self, length: int) -> int:
        """Length of a sequence once it can be cut."""
        return math.ceil(length / self.chunks) * self.chunks

    def own(self, padded: int) -> np.ndarray:
        """[padded / cp] which tokens of a padded sequence this rank has, in its order."""
        if self.context_size == 1:
            return np.arange(padded)
        chunk = padded // self.chunks
        first, second = self.context_rank * chunk, (self.chunks - 1 - self.context_rank) * chunk
        return np.concatenate([np.arange(first, first + chunk), np.arange(second, second + chunk)])

    def filler(self, padded_total: int) -> int:
        """Length, over all ranks, of the last segment, so that every rank's tokens are a multiple of `multiple`."""
        # A segment is cut in two on each rank, so its part there must be even.
        multiple = math.lcm(self.multiple, 2) if self.context_size > 1 else self.multiple
        here = padded_total // self.context_size
        wanted = max(math.ceil(max(here, self.least) / multiple), 1) * multiple
        return (wanted - here) * self.context_size


@dataclass(frozen=True)
class PackedBatch:
    """T tokens on this rank of n samples, L tokens and R response tokens over all context-parallel ranks."""

    positions: list[int]
    """[n] places of the samples in the batch; none for an idle micro-batch."""
    lengths: list[int]
    """[n] tokens of each sample, prompts included; they sum to L."""
    response_lengths: list[int]
    """[n]; they sum to R."""
    token_ids: torch.Tensor
    """[1, T] int64."""
    position_ids: torch.Tensor
    """[1, T] int64, from 0 in every segment."""
    padding: torch.Tensor
    """[1, T] bool, True where there is no sample's token."""
    boundaries: torch.Tensor
    """[segments + 1] int32: where each padded segment begins, in tokens over all context-parallel ranks."""
    longest: int
    """Tokens of the longest padded segment."""
    rows: torch.Tensor
    """[R on this rank] int64 in [0, T): which rows predict a response token."""
    targets: torch.Tensor
    """[R on this rank] int64: the token that each of them predicts."""
    places: torch.Tensor
    """[R on this rank] int64 in [0, R): where each belongs in the responses laid end to end."""
    token_rows: torch.Tensor
    """[L on this rank] int64 in [0, T): rows of samples' tokens, without padding."""
    token_places: torch.Tensor
    """[L on this rank] int64 in [0, L): where each belongs in the samples laid end to end."""
    mask: SamplingMask | None = None
    """What the targets were sampled among; None: all tokens."""
    routing: Any = None
    """`routing.py`'s `MicroRouting`, where the pass replays experts."""

    @property
    def num_responses(self) -> int:
        """R."""
        return sum(self.response_lengths)

    @property
    def num_tokens(self) -> int:
        """L."""
        return sum(self.lengths)

    def sequence_params(self) -> Any:
        """Megatron's `PackedSeqParams`, and in it the routing, so that every layer gets it with its input.

        Padding at the end of a sample counts as its tokens: under a causal mask no real token sees it.
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
    """This rank's part of the samples at `positions`.

    Raises:
        TrainError: A sample has no prompt token, or a token id outside the vocabulary.
    """
    return _packed(read_samples(batch, positions, vocab_size), packing, device)


def pack_nothing(packing: Packing, device: torch.device) -> PackedBatch:
    """A micro-batch of padding only, for a rank that has to take part in the others' collectives."""
    nothing = np.empty(0, np.int64)
    return _packed(SampleRows([], nothing, [], [], nothing, nothing), packing, device)


def _packed(samples: SampleRows, packing: Packing, device: torch.device) -> PackedBatch:
    padded = [packing.padded(length) for length in samples.lengths]
    if filler := packing.filler(sum(padded)):
        padded.append(filler)
    # Place of each token of this rank: in its segment, and among all samples' tokens (-1: padding).
    within = [packing.own(length) for length in padded]
    starts = np.cumsum([0, *samples.lengths]).tolist()
    real = [*samples.lengths, 0][: len(padded)]
    sources = [np.where(own < n, own + at, -1) for own, n, at in zip(within, real, starts)]
    source = np.concatenate(sources)
    token_rows = np.flatnonzero(source >= 0)
    token_places = source[token_rows]
    # Where each of the L tokens' prediction belongs among the R (-1: nowhere).
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
    """Of the responses' tokens at `places`, in that order."""
    counts = np.diff(offsets)[places]
    ends = np.cumsum(counts)
    chosen = np.repeat(offsets[:-1][places] - ends + counts, counts) + np.arange(counts.sum())
    return SamplingMask(torch.from_numpy(ids[chosen]).to(device), torch.from_numpy(np.concatenate([[0], ends])))
