"""A matrix product that picks the fastest CPU kernel for the size of its matrix.

The model runner calls it for every projection. For float32, `kernels/decode.c` is fastest, where the model runner has
it; else `F.linear` goes to MKL, which is best for small matrices, and oneDNN with pre-packed weights is 1.1 to 1.9
times as fast for larger ones, from about 8 rows on. The choice depends on sizes only, never on a measurement, so equal
runs stay bitwise equal. `repack` must follow every change of the weight.
Of a packed matrix the packed copy is kept alone, but for an embedding that is the output layer, too: its `weight` is
room that others use, with values of its own from a write or `unpack` until the next one's.
"""

from __future__ import annotations

import ctypes
import math
from functools import cache

import torch
import torch.nn.functional as F

_MIN_SIZE = {torch.float32: 1 << 17, torch.bfloat16: 0}
"""in * out from which the packed kernel pays."""
_MAX_TILED = 1 << 26
"""in * out up to which it is tried how the packed copy lies."""
_TILE = (64, 16)
"""out * in of the pieces that oneDNN packs a matrix by; a piece lies transposed."""


class Linear:
    """`x @ weight.T + bias`."""

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        alone: bool = False,
        kernels: ctypes.CDLL | None = None,
    ) -> None:
        self.weight = weight
        """[out, in]"""
        self.bias = bias
        """[out] or None"""
        self.alone = alone
        """Only the packed copy is kept."""
        self._packed: torch.Tensor | None = None
        self.tiles: torch.Tensor | None = None
        """[out / 64, in, 64] memory of the packed copy, where it is laid out so; of `kernels`, the last one padded."""
        self._kernels = kernels

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, in] -> [rows, out]."""
        if self._kernels is not None and self.tiles is not None:
            (out, size), x = self.weight.shape, x.contiguous()
            y, bias = x.new_empty(len(x), out), None if self.bias is None else self.bias.data_ptr()
            self._kernels.linear(len(x), size, out, x.data_ptr(), self.tiles.data_ptr(), bias, 0, y.data_ptr())
            return y
        if self._packed is not None:
            product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
            return product
        return F.linear(x, self.weight, self.bias)

    @property
    def packed_bytes(self) -> int:
        """Bytes of the packed copy."""
        return 0 if self._packed is None else self._packed.numel() * self._packed.element_size()

    def drop_packed(self) -> None:
        """Free the packed copy; `repack` makes it again."""
        self._packed = self.tiles = None

    def unpack(self) -> None:
        """Write what is served to `weight`."""
        if self.alone and self._packed is not None:
            own = self._kernels is not None
            dense = self._packed.transpose(1, 2).flatten(0, 1)[: len(self.weight)] if own else self._packed.to_dense()
            self.weight.copy_(dense)

    def repack(self) -> None:
        """Rebuild the packed copy from `weight`; a no-op where there is none."""
        weight = self.weight
        if self._kernels is not None and self.tiles is None:
            self._packed = self.tiles = weight.new_zeros(-(-len(weight) // _TILE[0]), weight.shape[1], _TILE[0])
        if self.tiles is not None:
            for tile, rows in zip(self.tiles, torch.split(weight, _TILE[0])):
                tile[:, : len(rows)].copy_(rows.t())
            return
        if not packs(weight.device, weight.dtype, weight.numel()):
            return
        self._packed = None  # freed first: the new copy then mostly gets its memory, whose pages are there already
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, 64)
        if weight.dtype == torch.float32 and weight.numel() <= _MAX_TILED and lies_in_tiles(*weight.shape):
            self.tiles = _tiles(self._packed, *weight.shape)


def packs(device: torch.device, dtype: torch.dtype, size: int) -> bool:
    """Whether a matrix of `size` numbers is packed."""
    return device.type == "cpu" and size >= _MIN_SIZE.get(dtype, math.inf) and packed_kernel_works(dtype)


def _tiles(packed: torch.Tensor, out: int, size: int) -> torch.Tensor:
    """The memory of a packed copy as [out / 64, in, 64].

    Written there, new values take no new memory, and less time than oneDNN, which goes through it against the grain.
    """
    memory = (ctypes.c_char * (4 * out * size)).from_address(torch.ops.mkldnn.data_ptr(packed))
    return torch.frombuffer(memory, dtype=torch.float32).view(-1, size, _TILE[0])


@cache
def lies_in_tiles(out: int, size: int) -> bool:
    """Whether oneDNN packs a float32 matrix of this shape on this processor as `_tiles` says."""
    if out % _TILE[0] or size % _TILE[1] or not hasattr(torch.ops.mkldnn, "data_ptr"):
        return False
    weight = torch.arange(out * size, dtype=torch.float32).view(out, size)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, 64)
    if torch.ops.mkldnn._nbytes(packed) != 4 * weight.numel():
        return False
    return torch.equal(_tiles(packed, out, size), weight.view(-1, _TILE[0], size).transpose(1, 2))


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
