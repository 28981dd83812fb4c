from __future__ import annotations

from slime_testing_contracts import MegatronModelContract

EXPERTS = {
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 16,
    "attention_bias": True,
}


class TestGlm45(MegatronModelContract):
    component = "glm4_moe"
    config = {**EXPERTS, "use_qk_norm": True, "head_dim": 8}


class TestGlm45Air(MegatronModelContract):
    component = "glm4_moe"
    config = {**EXPERTS, "n_group": 4, "topk_group": 2, "n_shared_experts": 2}
