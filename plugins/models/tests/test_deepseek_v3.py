from __future__ import annotations

import re
from typing import Any

import pytest
from slime_models.deepseek_v3 import megatron
from slime_trainer_megatron.families import places

from slime_core.errors import ConfigError

YARN = {
    "type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
# deepseek-ai/DeepSeek-V3, config.json.
V3 = {
    "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432,
    "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
    "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4,
    "first_k_dense_replace": 3, "moe_layer_freq": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "num_nextn_predict_layers": 1, "q_lora_rank": 1536,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "rope_theta": 10000,
    "rope_scaling": YARN, "rms_norm_eps": 1e-6, "max_position_embeddings": 163840, "tie_word_embeddings": False,
    "attention_bias": False, "hidden_act": "silu",
}  # fmt: skip
# moonshotai/Moonlight-16B-A3B, where it differs.
MOONLIGHT = {
    **V3, "vocab_size": 163840, "hidden_size": 2048, "intermediate_size": 11264, "moe_intermediate_size": 1408,
    "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16, "n_routed_experts": 64,
    "n_shared_experts": 2, "num_experts_per_tok": 6, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.446, "num_nextn_predict_layers": 0, "q_lora_rank": None, "rope_theta": 50000.0,
    "rope_scaling": None, "rms_norm_eps": 1e-5,
}  # fmt: skip


def test_the_numbers_of_deepseek_v3() -> None:
    fields = megatron(V3).architecture.transformer
    expected = {
        "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128,
        "rope_type": "yarn", "rotary_scaling_factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 1.0,
        "mscale_all_dim": 1.0, "moe_router_num_groups": 8, "moe_router_group_topk": 4, "moe_router_topk": 8,
        "moe_shared_expert_intermediate_size": 2048, "moe_layer_freq": [0] * 3 + [1] * 58,
        "moe_router_topk_scaling_factor": 2.5, "moe_router_enable_expert_bias": True,
    }  # fmt: skip
    assert {name: fields[name] for name in expected} == expected


def test_the_numbers_of_moonlight() -> None:
    model = megatron(MOONLIGHT)
    fields = model.architecture.transformer
    assert (fields["rope_type"], fields["rotary_base"]) == ("rope", 50000.0)
    assert fields["moe_shared_expert_intermediate_size"] == 2816
    assert "moe_router_num_groups" not in fields
    names = {name for place in places(model) for name in place.hf}
    assert "model.layers.5.self_attn.q_proj.weight" in names
    assert not [name for name in names if "q_a_proj" in name]


def test_parameters_add_up_to_the_published_671_billion() -> None:
    fields = megatron(V3).architecture.transformer
    hidden, heads = fields["hidden_size"], fields["num_attention_heads"]
    query = fields["qk_head_dim"] + fields["qk_pos_emb_head_dim"]
    attention = hidden * 1536 + 1536 * heads * query + hidden * (512 + 64) + 512 * heads * 256 + heads * 128 * hidden
    expert = 3 * hidden * fields["moe_ffn_hidden_size"]
    sparse = sum(fields["moe_layer_freq"])
    total = 61 * attention + 3 * 3 * hidden * fields["ffn_hidden_size"] + sparse * 257 * expert + 2 * 129280 * hidden
    assert 670e9 < total < 672e9


def test_older_and_newer_names_of_rotary_positions_mean_the_same() -> None:
    newer = {name: value for name, value in V3.items() if name not in ("rope_scaling", "rope_theta")}
    scaling = {name: value for name, value in YARN.items() if name != "type"}
    newer["rope_parameters"] = {**scaling, "rope_type": "yarn", "rope_theta": 10000}
    assert megatron(newer).architecture == megatron(V3).architecture


def test_layers_behind_the_decoder_are_carried() -> None:
    (pattern,) = megatron(V3).carried
    assert re.fullmatch(pattern, "model.layers.61.eh_proj.weight")
    assert not re.fullmatch(pattern, "model.layers.6.mlp.gate.weight")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported; allowed: 'sigmoid'"),
        ({"topk_method": "greedy"}, "topk_method"),
        ({"norm_topk_prob": False}, "norm_topk_prob"),
        ({"num_experts_per_tok": 1}, "allowed: 2 to 256"),
        ({"num_experts_per_tok": 12}, "allowed: two experts per group"),
        ({"n_group": 3}, "does not fit 256 experts"),
        ({"first_k_dense_replace": 62}, "allowed: 0 to 61"),
        ({"rope_interleave": False}, "rope_interleave"),
        ({"attention_bias": True}, "attention_bias"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_scaling": {**YARN, "type": "linear"}}, "rope type 'linear' is not supported; allowed: default, yarn"),
        ({"rope_scaling": {**YARN, "mscale": 0}}, "mscale_all_dim of YaRN without mscale"),
        ({"rope_scaling": {**YARN, "attention_factor": 1.0}}, "attention_factor"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "'original_max_position_embeddings'"),
    ],
)
def test_what_megatron_does_not_compute_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        megatron({**V3, **change})


@pytest.mark.parametrize("missing", ["kv_lora_rank", "q_lora_rank", "v_head_dim", "n_routed_experts"])
def test_a_missing_field_is_named(missing: str) -> None:
    with pytest.raises(ConfigError, match=missing):
        megatron({name: value for name, value in V3.items() if name != missing})
