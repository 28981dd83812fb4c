"""The same numbers from a family's plugin and from the trainer that knows the family."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from slime_commands.models.presets import find_preset
from slime_testing_contracts.tiny import tiny_moe_model
from slime_trainer_megatron.trainer import MegatronTrainer

from slime_core.errors import PluginNotFoundError
from slime_core.models.family import DecoderShape, RoutedLayers, decoder_shape, routed_layers
from tests.megatron_models import DEEPSEEK


def test_of_a_family_that_the_embedded_pair_knows() -> None:
    assert routed_layers(tiny_moe_model(), None) == RoutedLayers(3, (0, 2), 8, 2)


def test_of_a_family_that_only_megatron_has(tmp_path: Path) -> None:
    fields = {**DEEPSEEK, "model_type": "deepseek_v3", "hidden_act": "silu", "rope_theta": 10000.0}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert routed_layers(tmp_path, MegatronTrainer) == RoutedLayers(4, (1, 2, 3), 8, 4)


def test_of_a_family_that_nobody_knows(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "nobody"}')
    with pytest.raises(PluginNotFoundError, match="nobody"):
        routed_layers(tmp_path, MegatronTrainer)
    with pytest.raises(PluginNotFoundError, match="nobody"):
        routed_layers(tmp_path, None)


def shape_of(name: str, folder: Path) -> object:
    (folder / "config.json").write_text(json.dumps(dict(find_preset(name).config)))
    return decoder_shape(folder, MegatronTrainer)


def test_a_family_that_only_megatron_has(tmp_path: Path) -> None:
    """DeepSeek-V3: 3 dense layers of 18432; then 8 experts and one shared, of 2048 each; heads of 192 and 128."""
    shape = shape_of("deepseek-v3", tmp_path)
    inner = 18432 + 58 * (9 * 2048 - 18432) // 61
    assert vars(shape) == {
        "hidden_size": 7168, "intermediate_size": inner, "vocab_size": 129280, "num_layers": 61, "num_heads": 128,
        "num_kv_heads": 128, "head_dim": 160,
    }  # fmt: skip


def test_operations_counted_by_hand() -> None:
    shape = DecoderShape(
        hidden_size=16, intermediate_size=64, vocab_size=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8
    )
    # One token: q 16x16, k and v 16x8 each, o 16x16; attention 2 * 16; mlp 3 * 16 * 64; head 16 * 32.
    projections = 2 * (16 * 16 + 2 * 16 * 8 + 16 * 16)
    assert shape.forward_flops(1) == 2 * (projections + 2 * 16 + 2 * 3 * 16 * 64) + 2 * 16 * 32
