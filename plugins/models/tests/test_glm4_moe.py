from __future__ import annotations

from typing import Any

import pytest
from slime_models.glm4_moe import megatron

from slime_core.errors import ConfigError

# zai-org/GLM-4.5, from config.json.
GLM45 = {
    "model_type": "glm4_moe", "vocab_size": 151552, "hidden_size": 5120, "intermediate_size": 12288,
    "moe_intermediate_size": 1536, "num_hidden_layers": 92, "num_attention_heads": 96, "num_key_value_heads": 8,
    "head_dim": 128, "n_routed_experts": 160, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 3, "routed_scaling_factor": 2.5, "use_qk_norm": True,
    "attention_bias": True, "partial_rotary_factor": 0.5, "rope_theta": 1000000, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072, "num_nextn_predict_layers": 1,
}  # fmt: skip


def test_the_numbers_of_glm_4_5() -> None:
    model = megatron(GLM45)
    architecture, fields = model.architecture, model.architecture.transformer
    assert (architecture.rotary_percent, architecture.rotary_base) == (0.5, 1e6)
    assert (fields["kv_channels"], fields["num_query_groups"]) == (128, 8)
    assert (fields["qk_layernorm"], fields["add_qkv_bias"], fields.get("rotary_interleaved", False)) == (
        True,
        True,
        False,
    )
    assert fields["moe_layer_freq"] == [0] * 3 + [1] * 89
    assert model.carried == (r"model\.layers\.92\..*",)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm_topk_prob": False}, "norm_topk_prob"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size"),
        ({"rope_scaling": {"type": "yarn", "factor": 2}}, "rope type 'yarn'"),
        ({"first_k_dense_replace": -1}, "allowed: 0 to 92"),
    ],
)
def test_what_megatron_does_not_compute_is_refused(change: dict[str, Any], message: str) -> None:
    hf = {name: value for name, value in {**GLM45, **change}.items() if value is not None}
    with pytest.raises(ConfigError, match=message):
        megatron(hf)
