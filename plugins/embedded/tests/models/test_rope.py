from __future__ import annotations

from typing import Any

import pytest
import torch
from slime_embedded.models.rope import apply_rope, rope_cos_sin

from slime_core.errors import ConfigError
from slime_core.models.config import ModelConfig

LLAMA3 = {
    "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}  # fmt: skip


def hf_config(**rope: Any) -> dict[str, Any]:
    return {
        "model_type": "llama", "vocab_size": 9, "hidden_size": 64, "intermediate_size": 8, "num_hidden_layers": 1,
        "num_attention_heads": 4, "max_position_embeddings": 4096, "head_dim": 16,
        "rope_parameters": {"rope_theta": 5e5, "rope_type": "default", **rope},
    }  # fmt: skip


@pytest.mark.parametrize("rope", [{}, {"rope_type": "linear", "factor": 4.0}, LLAMA3])
def test_rotations_are_those_of_transformers(rope: dict[str, Any]) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    raw = hf_config(**rope)
    config = ModelConfig.from_hf(raw)
    positions = torch.tensor([0, 1, 2, 17, 300, 4000])
    cos, sin = rope_cos_sin(config, positions, "cpu")
    x = torch.randn(1, 4, 6, 16)
    theirs = LlamaRotaryEmbedding(LlamaConfig(**raw))(x, positions[None])
    torch.testing.assert_close(cos, theirs[0][0], atol=1e-6, rtol=0)
    torch.testing.assert_close(sin, theirs[1][0], atol=1e-6, rtol=0)
    expected, _ = apply_rotary_pos_emb(x, x, *theirs)
    torch.testing.assert_close(apply_rope(x[0].transpose(0, 1), cos, sin), expected[0].transpose(0, 1))


@pytest.mark.parametrize(
    ("rope", "word"), [({"rope_type": "yarn", "factor": 2.0}, "yarn"), ({"rope_type": "linear"}, "factor")]
)
def test_unknown_scaling_is_refused(rope: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        rope_cos_sin(ModelConfig.from_hf(hf_config(**rope)), torch.arange(2), "cpu")
