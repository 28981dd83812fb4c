from __future__ import annotations

from slime_testing_contracts import MegatronModelContract


class TestGlm47Flash(MegatronModelContract):
    component = "glm4_moe_lite"
    config = {
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 16,
        "num_key_value_heads": 4,
        "num_hidden_layers": 3,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "n_routed_experts": 8,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 16,
    }
