"""What `benchmarks/_measure.py` counts, against counting by hand."""

from __future__ import annotations

import pytest
import torch

from tests.scripts import load_script

measure = load_script("benchmarks/_measure.py")

HF = {
    "hidden_size": 8, "intermediate_size": 12, "vocab_size": 50, "num_hidden_layers": 3, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 4,
}  # fmt: skip


def test_flops_are_two_per_weight_and_token() -> None:
    weights = 3 * (8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 12) + 8 * 50
    attention = {n: 3 * 2 * n * n * 8 for n in (5, 7)}
    forward = {n: 2 * n * weights + attention[n] for n in (5, 7)}
    assert measure.step_flops(HF, [5, 7]) == 3 * (forward[5] + forward[7])


def test_flops_of_generation_are_those_that_it_needs() -> None:
    token, head, pair, keys = 2 * (2 * 64 + 2 * 32 + 3 * 96), 2 * 400, 4 * 8, 2 * 2 * 32
    prompt = 2 * (2 * token + pair * 3) + (keys + token + pair * 2) + head
    rest = 3 * (token + pair * 3) + head + 3 * (token + pair * 4) + head
    assert measure.decode_flops(HF, [[5, 6]], [3]) == prompt + rest
    assert measure.decode_flops(HF, [[5, 6], [5, 6]], [3, 1]) == prompt + rest


def test_peak_memory_sees_what_is_gone_at_the_end() -> None:
    with measure.PeakMemory() as memory:
        torch.ones(16 << 20).sum()
    assert memory.mib >= 60
    assert memory.total == pytest.approx(memory.before + memory.mib)


def test_a_matrix_product_has_a_speed() -> None:
    assert measure.matmul_flops_per_second("cpu", torch.float32, seconds=0.1) > 1e8
