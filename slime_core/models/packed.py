"""Sequence lengths -> the index tables with which a decoder runs on packed tokens and attends on padded groups.

`Decoder.hidden` keeps `[T, ...]` activations, all sequences laid end to end with no padding, for everything but
attention. For attention the tokens are gathered into right-padded groups of sequences of similar length, where
`is_causal` needs no mask, and gathered back. Padded rows hold copies of row 0, not zeros; they come after every real
token of their sequence, so no real query sees them, and they are dropped again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

GROUP_FLOOR = 64
"""Sequences up to this long share one group: padding them costs less than another attention call."""
GROUP_RATIO = 1.25
"""Longer ones share a group when their lengths differ by less than this factor."""


@dataclass(frozen=True)
class RowMap:
    """A gather of rows and the gather that undoes it: row `i` of the result is row `index[i]` of the input."""

    index: torch.Tensor
    """[rows of the result] int64."""
    inverse: torch.Tensor
    """[rows of the input] int64: where the input's row went."""
    dropped: torch.Tensor | None
    """[rows of the input, 1] True where the row went nowhere and `inverse` means nothing; None: every row is used."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Gather the rows of `x` [rows, width]; the gradient is a gather too, with no scattered additions."""
        result: torch.Tensor = _GatherRows.apply(x, self.index, self.inverse, self.dropped)  # type: ignore[no-untyped-call]
        return result


class _GatherRows(torch.autograd.Function):
    """`index_select` whose backward reads each output row's gradient at most once, so it is fast and deterministic."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        x: torch.Tensor,
        index: torch.Tensor,
        inverse: torch.Tensor,
        dropped: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(inverse, *(() if dropped is None else (dropped,)))
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        inverse, *dropped = ctx.saved_tensors  # type: ignore[attr-defined]
        if grad.shape[0] == 0:
            return grad.new_zeros(inverse.shape[0], grad.shape[1]), None, None, None
        result = grad.index_select(0, inverse)
        return result.masked_fill_(dropped[0], 0) if dropped else result, None, None, None


@dataclass(frozen=True)
class PackedLayout:
    """Everything about the lengths of one forward pass that does not depend on the layer."""

    positions: torch.Tensor
    """[T] int64 position of each token in its sequence."""
    groups: list[tuple[int, int]]
    """(sequences, padded length) of each attention group, in the order of the padded rows."""
    pad: RowMap | None
    """Packed rows -> padded rows; None when the packed rows already are the one group."""
    unpad: RowMap | None
    """Padded rows -> packed rows."""
    keep: RowMap | None
    """Packed rows -> the rows asked for; None when all are."""
    unpad_keep: RowMap | None
    """Padded rows -> the rows asked for."""

    @classmethod
    def build(
        cls, lengths: Sequence[int], device: torch.device | str = "cpu", rows: np.ndarray | None = None
    ) -> PackedLayout:
        """Plan one forward pass.

        Args:
            lengths: Tokens of each sequence, all >= 1.
            device: Where the tables live.
            rows: [R] distinct packed rows whose hidden state is wanted, in the order wanted; None means all.
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
        straight = len(groups) == 1 and bool(real.all())
        pad = None if straight else _row_map(padded, unpadded, None, device)
        unpad = None if straight else _row_map(unpadded, padded, ~real, device)
        keep = unpad_keep = None
        if rows is not None:
            keep = _selection(rows, total, device)
            unpad_keep = keep if straight else _selection(unpadded[rows], len(padded), device)
        return cls(torch.from_numpy(positions).to(device), groups, pad, unpad, keep, unpad_keep)

    def split(self, x: torch.Tensor, heads: int) -> list[torch.Tensor]:
        """[T, heads * head_dim] packed rows -> one [n, heads, length, head_dim] view per group."""
        padded = x if self.pad is None else self.pad(x)
        sizes = [n * length for n, length in self.groups]
        parts = torch.split(padded, sizes) if len(sizes) > 1 else (padded,)
        return [
            part.view(n, length, heads, -1).transpose(1, 2)
            for part, (n, length) in zip(parts, self.groups, strict=True)
        ]

    def join(self, parts: list[torch.Tensor], kept_only: bool = False) -> torch.Tensor:
        """Inverse of `split`; with `kept_only`, only the rows asked for."""
        flat = [part.transpose(1, 2).flatten(0, 1).flatten(1) for part in parts]
        padded = flat[0] if len(flat) == 1 else torch.cat(flat)
        rows = self.unpad_keep if kept_only else self.unpad
        return padded if rows is None else rows(padded)


def _padded_rows(sizes: np.ndarray, starts: np.ndarray) -> tuple[list[tuple[int, int]], np.ndarray, np.ndarray]:
    """Groups, packed row behind each padded row (0 for padding), and which padded rows are real."""
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


def _selection(rows: np.ndarray, total: int, device: torch.device | str) -> RowMap:
    inverse = np.zeros(total, dtype=np.int64)
    inverse[rows] = np.arange(len(rows))
    dropped = np.ones(total, dtype=bool)
    dropped[rows] = False
    return _row_map(rows, inverse, dropped, device)


def _row_map(index: np.ndarray, inverse: np.ndarray, dropped: np.ndarray | None, device: torch.device | str) -> RowMap:
    mask = None if dropped is None or not dropped.any() else torch.from_numpy(dropped)[:, None].to(device)
    return RowMap(torch.from_numpy(index).to(device), torch.from_numpy(inverse).to(device), mask)
