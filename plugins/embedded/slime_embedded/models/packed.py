"""Sequence lengths -> the index tables with which a decoder runs on packed tokens and attends on padded groups.

Except for attention, `Decoder.hidden` keeps `[T, ...]` activations: all sequences concatenated without padding. For
attention the tokens are gathered into right-padded groups of sequences of similar length, where `is_causal` needs no
mask, and gathered back. Padded rows hold copies of row 0, not zeros. They come after every real token of their
sequence, so no real query attends to them, and they are dropped afterwards. Rows that are equal in several sequences,
such as the rows of a group's prompt, are computed once and gathered into each sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch

_Device = torch.device | str
GROUP_FLOOR = 64
"""Sequences up to this length share one group: padding them costs less than another attention call."""
GROUP_RATIO = 1.25
"""Longer sequences share a group when their lengths differ by less than this factor."""


@dataclass(frozen=True)
class RowMap:
    """A gather of rows and the gather that undoes it: row `i` of the result is row `index[i]` of the input."""

    index: torch.Tensor
    """[rows of the result] int64."""
    inverse: torch.Tensor
    """[rows of the input] int64 row of the result that holds each input row."""
    dropped: torch.Tensor | None
    """[rows of the input, 1] True for an unused row, whose `inverse` has no meaning; None: every row is used."""
    again: tuple[torch.Tensor, torch.Tensor] | None = None
    """Repeated rows of the result, and the input rows that they repeat; None: no row is used twice."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Gather the rows of `x` [rows, width]; the gradient is a gather too, with additions where a row repeats."""
        return cast(torch.Tensor, _GatherRows.apply(x, self))  # type: ignore[no-untyped-call]


class _GatherRows(torch.autograd.Function):
    """`index_select` whose backward reads each output row's gradient at most once, so it is fast and deterministic."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rows: RowMap) -> torch.Tensor:
        ctx.rows = rows
        return x.index_select(0, rows.index)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        rows: RowMap = ctx.rows
        if grad.shape[0] == 0:
            return grad.new_zeros(rows.inverse.shape[0], grad.shape[1]), None
        result = grad.index_select(0, rows.inverse)
        if rows.dropped is not None:
            result.masked_fill_(rows.dropped, 0)
        if rows.again is not None:
            repeats, repeated = rows.again
            added = grad.index_select(0, repeats)
            # The order of additions is fixed in `index_add_` on a CPU only, and in `index_put_` on a GPU only.
            if grad.device.type == "cpu":
                result.index_add_(0, repeated, added)
            else:
                result.index_put_((repeated,), added, accumulate=True)
        return result, None


@dataclass(frozen=True)
class PackedLayout:
    """The index tables of one forward pass, derived from sequence lengths and shared by all layers."""

    computed: torch.Tensor | None
    """[C] int64 tokens whose rows are computed, called "packed rows" below; None: all T."""
    positions: torch.Tensor
    """[C] int64 position of each packed row in its sequence."""
    groups: list[tuple[int, int]]
    """(sequences, padded length) of each attention group, in the order of the padded rows."""
    pad: RowMap | None
    """Packed rows -> padded rows; None when the packed rows already form a single group."""
    unpad: RowMap | None
    """Padded rows -> packed rows."""
    keep: RowMap | None
    """Packed rows -> requested rows; None when all rows are requested."""
    unpad_keep: RowMap | None
    """Padded rows -> requested rows."""
    repeat: RowMap | None
    """Distinct requested rows -> all requested rows; None when no token is a copy."""
    tokens: list[torch.Tensor]
    """Tables for compiled attention, which does not pad: [T] int64 packed row of each token; [T] row of its result
    among the packed rows, -1 without a result; the same among the requested rows; [sequences + 1] starts of the
    sequences."""

    @classmethod
    def build(
        cls,
        lengths: Sequence[int],
        device: _Device = "cpu",
        rows: np.ndarray | None = None,
        same: np.ndarray | None = None,
    ) -> PackedLayout:
        """Plan one forward pass.

        Args:
            lengths: Tokens of each sequence, all >= 1.
            device: Device of the tables.
            rows: [R] distinct packed rows whose hidden states are requested, in the requested order; None means all.
                Copies are kept once, in ascending order, and `repeat` has all rows.
            same: [T] as for `Decoder.hidden`.
        """
        assert lengths, "a forward pass needs at least one sequence"
        sizes = np.asarray(lengths, dtype=np.int64)
        assert sizes.min(initial=1) > 0, "every sequence needs at least one token"
        ends = np.cumsum(sizes)
        total, starts = int(ends[-1]), ends - sizes
        positions = np.arange(total) - np.repeat(starts, sizes)
        groups, padded, real = _padded_rows(sizes, starts)
        unpadded = np.empty(total, dtype=np.int64)
        unpadded[padded[real]] = np.flatnonzero(real)
        same = np.arange(total) if same is None else same
        first = same == np.arange(total)
        place, computed, once = (np.cumsum(first) - 1)[same], np.flatnonzero(first), real & first[padded]
        straight, again = len(groups) == 1 and bool(once.all()), np.flatnonzero(real & ~once)
        pad = None if straight else _row_map(place[padded], unpadded[computed], None, device, again)
        unpad = None if straight else _row_map(unpadded[computed], place[padded], ~once, device)
        keep = unpad_keep = repeat = None
        if rows is not None:
            if len(computed) < total:  # some of them may be copies
                rows, at, index = np.unique(same[rows], return_index=True, return_inverse=True)
                repeat = _row_map(index, at, None, device, np.delete(np.arange(len(index)), at))
            keep = _selection(place[rows], len(computed), device)
            unpad_keep = keep if straight else _selection(unpadded[rows], len(padded), device)
        chosen = _tensor(computed, device) if len(computed) < total else None
        kept = np.full(total, -1)
        if rows is not None:
            kept[rows] = np.arange(len(rows))
        tables = (place, np.where(first, place, -1), kept, np.concatenate(([0], ends)))
        tokens, places = [_tensor(table, device) for table in tables], _tensor(positions[computed], device)
        return cls(chosen, places, groups, pad, unpad, keep, unpad_keep, repeat, tokens)

    def split(self, x: torch.Tensor, heads: int) -> list[torch.Tensor]:
        """Split packed rows [T, heads * head_dim] into one [n, heads, length, head_dim] view per group."""
        padded = x if self.pad is None else self.pad(x)
        sizes = [n * length for n, length in self.groups]
        parts = torch.split(padded, sizes) if len(sizes) > 1 else (padded,)
        return [
            part.view(n, length, heads, -1).transpose(1, 2)
            for part, (n, length) in zip(parts, self.groups, strict=True)
        ]

    def join(self, parts: list[torch.Tensor], kept_only: bool = False) -> torch.Tensor:
        """Join the output of `split` to packed rows; with `kept_only`, return only the requested rows."""
        flat = [part.transpose(1, 2).flatten(0, 1).flatten(1) for part in parts]
        padded = flat[0] if len(flat) == 1 else torch.cat(flat)
        rows = self.unpad_keep if kept_only else self.unpad
        return padded if rows is None else rows(padded)


def _padded_rows(sizes: np.ndarray, starts: np.ndarray) -> tuple[list[tuple[int, int]], np.ndarray, np.ndarray]:
    """Return the groups, the packed row of each padded row (0 for padding), and a mask of real padded rows."""
    steps = np.log(np.maximum(sizes, GROUP_FLOOR) / GROUP_FLOOR) / np.log(GROUP_RATIO)
    buckets = np.ceil(steps - 1e-9).astype(np.int64)
    groups: list[tuple[int, int]] = []
    rows, real = [], []
    for bucket in np.unique(buckets):
        members = np.flatnonzero(buckets == bucket)
        offsets = np.arange(sizes[members].max())
        inside = offsets[None, :] < sizes[members][:, None]
        groups.append((len(members), len(offsets)))
        rows.append(np.where(inside, starts[members][:, None] + offsets[None, :], 0).ravel())
        real.append(inside.ravel())
    return groups, np.concatenate(rows), np.concatenate(real)


def _selection(rows: np.ndarray, total: int, device: _Device) -> RowMap:
    inverse = np.zeros(total, dtype=np.int64)
    inverse[rows] = np.arange(len(rows))
    dropped = np.ones(total, dtype=bool)
    dropped[rows] = False
    return _row_map(rows, inverse, dropped, device)


def _row_map(
    index: np.ndarray, inverse: np.ndarray, dropped: np.ndarray | None, device: _Device, again: np.ndarray | None = None
) -> RowMap:
    mask = None if dropped is None or not dropped.any() else _tensor(dropped, device)[:, None]
    repeats = None if again is None or not len(again) else (_tensor(again, device), _tensor(index[again], device))
    return RowMap(_tensor(index, device), _tensor(inverse, device), mask, repeats)


def _tensor(array: np.ndarray, device: _Device) -> torch.Tensor:
    return torch.from_numpy(array).to(device)
