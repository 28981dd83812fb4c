from __future__ import annotations

from slime_models.kimi_k2 import megatron

# moonshotai/Kimi-K2-Instruct, from config.json.
K2 = {
    "model_type": "kimi_k2", "vocab_size": 163840, "hidden_size": 7168, "intermediate_size": 18432,
    "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 64, "num_key_value_heads": 64,
    "n_routed_experts": 384, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "moe_layer_freq": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.827,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "num_nextn_predict_layers": 0, "q_lora_rank": 1536,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "rope_theta": 50000.0,
    "rope_scaling": {
        "type": "yarn", "factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
    "rms_norm_eps": 1e-6, "max_position_embeddings": 131072, "tie_word_embeddings": False,
}  # fmt: skip


def test_the_numbers_of_kimi_k2() -> None:
    fields = megatron(K2).architecture.transformer
    expected = {
        "num_moe_experts": 384, "moe_router_topk_scaling_factor": 2.827, "moe_layer_freq": [0] + [1] * 60,
        "rotary_scaling_factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0, "rotary_base": 50000.0,
    }  # fmt: skip
    assert {name: fields[name] for name in expected} == expected
    assert "moe_router_num_groups" not in fields


def test_one_trillion_parameters() -> None:
    fields = megatron(K2).architecture.transformer
    experts = 60 * 385 * 3 * fields["hidden_size"] * fields["moe_ffn_hidden_size"]
    assert 1.0e12 < experts < 1.05e12
