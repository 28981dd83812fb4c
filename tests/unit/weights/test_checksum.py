from __future__ import annotations

import torch

from slime_core.weights.sync import tensor_checksum


def test_equal_tensors_have_equal_checksums_however_stored() -> None:
    x = torch.randn(6, 4)
    assert tensor_checksum(x) == tensor_checksum(x.t().contiguous().t())
    assert tensor_checksum(x) == tensor_checksum(x.clone().requires_grad_())
    assert tensor_checksum(x[:1, 0]) == tensor_checksum(x[0, :1])  # one element, stride 4 and 1


def test_value_shape_and_dtype_count() -> None:
    x = torch.arange(12, dtype=torch.bfloat16)
    changed = x.clone()
    changed[3] += 1
    others = [changed, x.view(3, 4), x.view(4, 3), x.float(), x.view(torch.float16), torch.tensor(1.0)]
    assert len({tensor_checksum(t) for t in [x, *others]}) == 7
