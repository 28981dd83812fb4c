from __future__ import annotations

from slime_testing_contracts import MegatronModelContract

LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "head_dim": 16,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
}


class TestQwen3Next(MegatronModelContract):
    component = "qwen3_next"
    config = {**LINEAR, **EXPERTS, "num_hidden_layers": 4}


class TestQwen3NextWithDenseLayersAndOtherIntervals(MegatronModelContract):
    component = "qwen3_next"
    config = {
        **LINEAR,
        **EXPERTS,
        "num_hidden_layers": 3,
        "layer_types": ["full_attention", "linear_attention", "linear_attention"],
        "mlp_only_layers": [1],
        "norm_topk_prob": False,
        "tie_word_embeddings": True,
    }
