"""Tensors -> buckets and back."""

from __future__ import annotations

import pytest
import torch
from slime_engine_http.weights.buckets import Buffers, group_tensors

from slime_core.errors import WeightSyncError


def named(*sizes: int, dtype: torch.dtype = torch.uint8) -> list[tuple[str, torch.Tensor]]:
    return [(f"t{i}", torch.full((size,), i, dtype=dtype)) for i, size in enumerate(sizes)]


@pytest.mark.parametrize(
    ("sizes", "groups"),
    [((3, 3, 3), [2, 1]), ((6,), [1]), ((9, 1), [1, 1]), ((1, 9), [1, 1]), ((0, 2, 0, 2, 2), [3]), ((4, 4), [1, 1])],
)
def test_groups_hold_so_many_bytes(sizes: tuple[int, ...], groups: list[int]) -> None:
    found = list(group_tensors(named(*sizes), 6))
    assert [len(run) for run, _ in found] == groups
    assert [last for _, last in found] == [False] * (len(groups) - 1) + [True]
    assert [name for run, _ in found for name, _ in run] == [f"t{i}" for i, size in enumerate(sizes) if size]


def test_a_name_that_comes_again_is_an_error_wherever_it_does() -> None:
    with pytest.raises(WeightSyncError, match="tensor 't1' twice"):
        list(group_tensors([*named(3, 3, 3), ("t1", torch.ones(1))], 6))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bool, torch.int64, torch.float16])
def test_dtypes_of_quantized_models_arrive_bit_by_bit(dtype: torch.dtype, shared: bool) -> None:
    raw = torch.arange(240, dtype=torch.uint8).reshape(5, 48)
    given = (raw % 2).bool() if dtype is torch.bool else raw.view(dtype)
    buffers = Buffers(shared=shared, keep=False)
    bucket = buffers.fill([("odd", torch.ones(3, dtype=torch.uint8)), ("turned", given.t()), ("whole", given)])
    found = dict(bucket.named())
    assert found["whole"].dtype == dtype
    assert torch.equal(found["whole"].view(torch.uint8), given.view(torch.uint8))
    assert torch.equal(found["turned"].view(torch.uint8), given.t().contiguous().view(torch.uint8))
    del found, bucket
    buffers.free()
