"""A matrix product that picks the fastest CPU kernel for the size of its matrix.

The model runner calls it for every projection. For float32, `kernels/decode.c` is fastest, where the model runner has
it; else `F.linear` goes to MKL, which is best for small matrices, and oneDNN with pre-packed weights is 1.1 to 1.9
times as fast for larger ones, from about 8 rows on. The choice depends on sizes only, never on a measurement, so equal
runs stay bitwise equal. `repack` must follow every change of the weight.
A packed matrix is kept only as the packed copy, except for an embedding that is also the output layer. If only the
packed copy is kept, `weight` is memory shared with other matrices: it has the matrix's values from a write or `unpack`
until another matrix's write or `unpack`.
"""

from __future__ import annotations

import ctypes
import math
from functools import cache

import torch
import torch.nn.functional as F

_MIN_SIZE = {torch.float32: 1 << 17, torch.bfloat16: 0}
"""Smallest in * out for which the packed kernel is faster."""
_TILE = 64
"""Number of weight rows that are stored side by side, transposed, in the format of `kernels/decode.c`."""


class Linear:
    """A linear layer: `x @ weight.T + bias`."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, alone: bool = False, kernels: ctypes.CDLL | None = None
    ) -> None:
        self.weight = weight
        """[out, in]"""
        self.bias = bias
        """[out] or None"""
        self.alone = alone
        """True if only the packed copy is kept."""
        self._kernels = kernels
        self.packed: torch.Tensor | None = None
        """oneDNN's format, or for `kernels` [out / 64, in, 64] with the last tile padded; an update recreates it."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Compute [rows, in] -> [rows, out]."""
        if self.packed is None:
            return F.linear(x, self.weight, self.bias)
        if self._kernels is None:
            out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
            return out
        (rows, size), x = self.weight.shape, x.contiguous()
        out, bias = x.new_empty(len(x), rows), None if self.bias is None else self.bias.data_ptr()
        self._kernels.linear(len(x), size, rows, x.data_ptr(), self.packed.data_ptr(), bias, 0, out.data_ptr())
        return out

    def unpack(self) -> None:
        """Write the served values to `weight`."""
        if self.alone and self.packed is not None:
            rows = self.packed.to_dense() if self._kernels is None else self.packed.transpose(1, 2).flatten(0, 1)
            self.weight.copy_(rows[: len(self.weight)])

    def pack(self, rows: torch.Tensor, place: torch.Tensor) -> bool:
        """Write rows [n, in] to the packed copy of `kernels`, at the position of `place` in `weight`.

        `place` is a view of these rows, or [heads, 2, dim / 2, in], in which rows i and i + dim / 2 of a head are side
        by side. Returns False if there is no such copy: then write `weight` and call `repack`.
        """
        if self._kernels is None:
            return False
        count, size = self.weight.shape
        if self.packed is None:
            self.packed = self.weight.new_zeros(-(-count // _TILE), size, _TILE)
        rows = rows.to(self.weight.dtype).contiguous()
        first = (place.storage_offset() - self.weight.storage_offset()) // size
        dim = 2 * place.shape[2] if place.dim() == 4 else 0
        self._kernels.pack(*rows.shape, rows.data_ptr(), self.packed.data_ptr(), first, dim)
        return True

    def repack(self) -> None:
        """Rebuild oneDNN's packed copy from `weight`; a no-op for weights without a packed copy."""
        weight = self.weight
        if self._kernels is None and packs(weight.device, weight.dtype, weight.numel()):
            self.packed = None  # freed first, so the new copy mostly reuses its memory, whose pages are already mapped
            self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, 64)


def packs(device: torch.device, dtype: torch.dtype, size: int) -> bool:
    """Return True if a matrix of `size` numbers is packed."""
    return device.type == "cpu" and size >= _MIN_SIZE.get(dtype, math.inf) and packed_kernel_works(dtype)


@cache
def packed_kernel_works(dtype: torch.dtype) -> bool:
    """True when torch has oneDNN's packed product for `dtype` and it agrees with `F.linear` on a small case.

    The operators are internal to torch, hence the check instead of a version number.
    """
    if not torch._C._has_mkldnn or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    x = torch.linspace(-1, 1, 16 * 32).view(16, 32).to(dtype)
    weight = torch.linspace(-1, 1, 48 * 32).view(48, 32).to(dtype)
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, 64)
        out = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    except (RuntimeError, NotImplementedError):
        return False
    return bool(torch.allclose(out, F.linear(x, weight), rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5))
