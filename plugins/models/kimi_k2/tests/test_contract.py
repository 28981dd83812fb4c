from __future__ import annotations

from slime_testing_contracts import MegatronModelContract


class TestKimiK2(MegatronModelContract):
    component = "kimi_k2"
    reference = "deepseek_v3"
    config = {
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "n_routed_experts": 12,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 16,
        "n_group": 1,
        "topk_group": 1,
    }
