from __future__ import annotations

import pytest
from slime_models.glm4_moe_lite import megatron

from slime_core.errors import ConfigError

# zai-org/GLM-4.7-Flash, from config.json.
FLASH = {
    "model_type": "glm4_moe_lite", "vocab_size": 154880, "hidden_size": 2048, "intermediate_size": 10240,
    "moe_intermediate_size": 1536, "num_hidden_layers": 47, "num_attention_heads": 20, "num_key_value_heads": 20,
    "n_routed_experts": 64, "n_shared_experts": 1, "num_experts_per_tok": 4, "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.8, "q_lora_rank": 768, "kv_lora_rank": 512, "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64, "v_head_dim": 256, "rope_theta": 1000000.0, "max_position_embeddings": 202752,
}  # fmt: skip


def test_dense_layers_by_number_or_by_name() -> None:
    by_number = megatron(FLASH).architecture
    assert by_number.transformer["moe_layer_freq"] == [0] + [1] * 46
    assert megatron({**FLASH, "mlp_layer_types": ["dense"] + ["sparse"] * 46}).architecture == by_number
    assert by_number.transformer["layernorm_epsilon"] == 1e-5


@pytest.mark.parametrize("kinds", [["dense"], ["dense"] + ["mixed"] * 46])
def test_other_kinds_of_layers_are_refused(kinds: list[str]) -> None:
    with pytest.raises(ConfigError, match="'dense' or 'sparse' for each of 47 layers"):
        megatron({**FLASH, "mlp_layer_types": kinds})
