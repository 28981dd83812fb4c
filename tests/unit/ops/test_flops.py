from __future__ import annotations

from slime_core.models.family import DecoderShape


def test_counts_by_hand() -> None:
    shape = DecoderShape(
        hidden_size=16, intermediate_size=64, vocab_size=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8
    )
    # One token: q 16x16, k and v 16x8 each, o 16x16; attention 2 * 16; mlp 3 * 16 * 64; head 16 * 32.
    projections = 2 * (16 * 16 + 2 * 16 * 8 + 16 * 16)
    assert shape.forward_flops(1) == 2 * (projections + 2 * 16 + 2 * 3 * 16 * 64) + 2 * 16 * 32
