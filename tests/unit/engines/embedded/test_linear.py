from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from slime_core.engines.embedded.linear import Linear


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 64, 200])
@pytest.mark.parametrize("bias", [False, True])
def test_every_kernel_gives_the_product_of_the_present_weight(rows: int, bias: bool) -> None:
    torch.manual_seed(rows)
    weight, offset = torch.randn(96, 256), torch.randn(96) if bias else None
    linear = Linear(weight, offset)
    x = torch.randn(rows, 256)
    for _ in range(2):
        linear.repack()
        expected = F.linear(x.double(), weight.double(), None if offset is None else offset.double())
        torch.testing.assert_close(linear(x).double(), expected, atol=1e-4, rtol=1e-5)
        weight.normal_()
