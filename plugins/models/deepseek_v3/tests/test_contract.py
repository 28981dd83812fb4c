from __future__ import annotations

from slime_testing_contracts import MegatronModelContract

LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
}
EXPERTS = {
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 16,
    "n_group": 4,
    "topk_group": 2,
}


class TestDeepSeekV3(MegatronModelContract):
    component = "deepseek_v3"
    config = {**LATENT, **EXPERTS}


class TestMoonlight(MegatronModelContract):
    component = "deepseek_v3"
    config = {**LATENT, **EXPERTS, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "n_shared_experts": 2}
