"""A matrix product that picks the fastest CPU kernel for the number of rows.

The model runner calls it for every projection. For float32, `F.linear` goes to MKL, which is best for a few rows;
oneDNN with pre-packed weights is up to 2.5 times faster from about 8 rows on. The choice depends on sizes only,
never on a measurement, so equal runs stay bitwise equal. `repack` must follow every change of the weight.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F

_MIN_WORK = {torch.float32: 1 << 19, torch.bfloat16: 0}
"""rows * in * out from which the packed kernel pays."""


class Linear:
    """`x @ weight.T + bias`."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight = weight
        """[out, in]"""
        self.bias = bias
        """[out] or None"""
        self._packed: torch.Tensor | None = None
        self._min_rows = 1

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, in] -> [rows, out]."""
        if self._packed is not None and x.shape[0] >= self._min_rows:
            out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
            return out
        return F.linear(x, self.weight, self.bias)

    @property
    def packed_bytes(self) -> int:
        """Bytes of the packed copy."""
        return 0 if self._packed is None else self._packed.numel() * self._packed.element_size()

    def drop_packed(self) -> None:
        """Free the packed copy; `repack` makes it again."""
        self._packed = None

    def repack(self) -> None:
        """Rebuild the packed copy from `weight`; a no-op where there is no packed kernel."""
        weight = self.weight
        if weight.device.type != "cpu" or weight.dtype not in _MIN_WORK or not packed_kernel_works(weight.dtype):
            return
        self._min_rows = max(1, -(-_MIN_WORK[weight.dtype] // weight.numel()))
        if weight.dtype == torch.float32:
            self._min_rows = max(8, self._min_rows)
        self._packed = None  # freed first: the new copy then mostly gets its memory, whose pages are there already
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, 64)


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
