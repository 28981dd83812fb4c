from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from slime_embedded.engine.linear import Linear, packed_kernel_works
from slime_embedded.kernels import load

from tests.sweeps import sweep


@sweep("rows, bias, out, source", product([1, 2, 7, 8, 9, 64, 200], [False, True], [96, 512, 520], ["decode", None]))
def test_every_kernel_gives_the_product_of_the_present_weight(
    rows: int, bias: bool, out: int, source: str | None
) -> None:
    torch.manual_seed(rows)
    weight, offset = torch.randn(out, 256), torch.randn(out) if bias else None
    linear = Linear(weight, offset, kernels=None if source is None else load(source))
    x = torch.randn(rows, 256)
    for _ in range(2):
        _ = linear.pack(weight, weight) or linear.repack()
        expected = F.linear(x.double(), weight.double(), None if offset is None else offset.double())
        torch.testing.assert_close(linear(x).double(), expected, atol=1e-4, rtol=1e-5)
        weight.normal_()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(520, 256), (512, 512)])
@pytest.mark.skipif(not packed_kernel_works(torch.float32), reason="torch has no packed product here")
@pytest.mark.parametrize("source", ["decode", None])
def test_a_packed_copy_alone_serves_and_is_read_back(
    dtype: torch.dtype, shape: tuple[int, int], source: str | None
) -> None:
    """What lies in `weight` meanwhile is another projection's."""
    kernels = load(source) if source is not None and dtype == torch.float32 else None
    weight, x = torch.empty(shape, dtype=dtype), torch.randn(1, shape[1]).to(dtype)
    linear = Linear(weight, None, alone=True, kernels=kernels)
    for _ in range(3):
        given = torch.randn(shape).to(dtype)
        if not linear.pack(given, weight):
            weight.copy_(given)
            linear.repack()
        weight.fill_(float("nan"))
        torch.testing.assert_close(linear(x), F.linear(x, given), rtol=1e-2, atol=1e-3)
        linear.unpack()
        assert torch.equal(weight, given)


@pytest.mark.skipif(load("decode") is None, reason="no C compiler")
def test_rows_are_packed_as_a_write_through_the_view_would_lay_them() -> None:
    weight, parts = torch.empty(160, 48), [torch.randn(rows, 48) for rows in (96, 64)]
    linear = Linear(weight, None, alone=True, kernels=load("decode"))
    places = weight[:96].view(2, 24, 2, 48).transpose(1, 2), weight[96:]
    for part, place in zip(parts, places):
        assert linear.pack(part, place)
    linear.unpack()
    for part, place in zip(parts, places):
        assert torch.equal(place.reshape(part.shape), part)
