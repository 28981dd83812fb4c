from __future__ import annotations

import json
from pathlib import Path

from slime_commands.models.presets import find_preset
from slime_trainer_megatron.trainer import MegatronTrainer

from slime_core.models.family import decoder_shape


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


def test_a_dense_family_that_both_trainers_have(tmp_path: Path) -> None:
    assert vars(shape_of("qwen3-4B", tmp_path)) == {
        "hidden_size": 2560, "intermediate_size": 9728, "vocab_size": 151936, "num_layers": 36, "num_heads": 32,
        "num_kv_heads": 8, "head_dim": 128,
    }  # fmt: skip


def test_experts_of_a_family_that_both_trainers_have(tmp_path: Path) -> None:
    shape = shape_of("qwen3-30B-A3B", tmp_path)
    assert getattr(shape, "intermediate_size") == 8 * 768  # noqa: B009 -- any shape
