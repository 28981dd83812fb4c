"""Merges against layouts written out by hand, and what the row helpers name."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from slime_trainer_megatron.families import (
    QKV,
    Columns,
    Gated,
    GatedFused,
    Merge,
    Rows,
    decoder_architecture,
)

from slime_core.errors import ConfigError
from tests.sweeps import sweep

HF = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip


def labelled(start: int, rows: int, columns: int = 3) -> torch.Tensor:
    """Row i is all `start + i`, so that a row says where it came from."""
    return (start + torch.arange(rows)).float()[:, None].expand(rows, columns).contiguous()


def rows_of(tensor: torch.Tensor) -> list[int]:
    return [int(value) for value in tensor[:, 0]]


def test_queries_keys_and_values_are_interleaved_by_group() -> None:
    # 4 heads in 2 groups, head_dim 2: queries 0..7, keys 100..103, values 200..203.
    tensors = [labelled(0, 8), labelled(100, 4), labelled(200, 4)]
    merged = QKV(4, 2, 2).to_megatron(tensors, 0, 1)
    assert rows_of(merged) == [0, 1, 2, 3, 100, 101, 200, 201, 4, 5, 6, 7, 102, 103, 202, 203]
    assert rows_of(QKV(4, 2, 2).to_megatron(tensors, 1, 2)) == rows_of(merged)[8:]
    assert rows_of(QKV(4, 2, 2).to_megatron(tensors, 1, 4)) == rows_of(merged)[4:8]  # a part of a group


def test_gates_of_the_attention_come_after_the_queries_of_their_group() -> None:
    # HF: head by head its query (2 rows), then its gate (2 rows).
    tensors = [labelled(0, 16), labelled(100, 4), labelled(200, 4)]
    merged = QKV(4, 2, 2, gated=True).to_megatron(tensors, 0, 1)
    first = [0, 1, 4, 5, 2, 3, 6, 7, 100, 101, 200, 201]
    assert rows_of(merged)[:12] == first
    back = QKV(4, 2, 2, gated=True).to_hf([merged])
    assert all(torch.equal(one, other) for one, other in zip(back, tensors))


def test_every_rank_has_its_gate_above_its_up_projection() -> None:
    gate, up = labelled(0, 4), labelled(10, 4)
    assert rows_of(Gated().to_megatron([gate, up], 0, 2)) == [0, 1, 10, 11]
    assert rows_of(Gated().to_megatron([gate, up], 1, 2)) == [2, 3, 12, 13]
    fused = torch.cat([gate, up])
    assert torch.equal(GatedFused().to_megatron([fused], 1, 2), Gated().to_megatron([gate, up], 1, 2))


CASES: list[tuple[Merge, list[tuple[int, ...]]]] = [
    (Columns(), [(8, 6)]),
    (Columns(), [(8,)]),
    (Rows(), [(6, 8)]),
    (Gated(), [(8, 6), (8, 6)]),
    (Gated(), [(8,), (8,)]),
    (GatedFused(), [(16, 6)]),
    (QKV(8, 4, 2), [(16, 6), (8, 6), (8, 6)]),
    (QKV(8, 4, 2), [(16,), (8,), (8,)]),
    (QKV(8, 1, 2), [(16, 6), (2, 6), (2, 6)]),
    (QKV(8, 4, 2, gated=True), [(32, 6), (8, 6), (8, 6)]),
]


@sweep("size, case, dtype", product([1, 2, 4], range(len(CASES)), [torch.float32, torch.bfloat16]))
def test_the_way_back_loses_no_bit_and_slices_are_the_same(case: int, size: int, dtype: torch.dtype) -> None:
    merge, shapes = CASES[case]
    whole = [torch.randn(shape, generator=torch.Generator().manual_seed(i)).to(dtype) for i, shape in enumerate(shapes)]
    parts = [merge.to_megatron(whole, rank, size) for rank in range(size)]
    back = merge.to_hf(parts)
    assert all(torch.equal(one, other) for one, other in zip(back, whole, strict=True))
    axis = merge.read_axis(size)
    if axis is not None:
        for rank, part in enumerate(parts):
            cut = [tensor.chunk(size, axis)[rank] for tensor in whole]
            assert torch.equal(merge.to_megatron(cut, 0, 1), part)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; allowed: silu"),
        ({"rope_scaling": {"type": "yarn"}}, "rope type 'yarn' is not supported; allowed: default, llama3"),
    ],
)
def test_what_megatron_would_compute_otherwise_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        decoder_architecture({**HF, **change})
