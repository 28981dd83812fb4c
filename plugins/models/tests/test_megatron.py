"""Every component against the contract of its kind; families for Megatron against transformers and plain loops."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from slime_models.deepseek_v3 import megatron
from slime_models.glm4.megatron import megatron as glm4_megatron
from slime_models.glm4_moe import megatron as glm4_moe_megatron
from slime_models.glm4_moe_lite import megatron as glm4_moe_lite_megatron
from slime_models.kimi_k2 import megatron as kimi_k2_megatron
from slime_models.mimo import megatron as mimo_megatron
from slime_models.minimax_m2.megatron import megatron as minimax_m2_megatron
from slime_models.qwen3_next.delta_rule import causal_conv, gated_delta_rule
from slime_models.qwen3_next.megatron import megatron as qwen3_next_megatron
from slime_testing_contracts import MegatronModelContract, suites
from slime_trainer_megatron.families import places
from torch import Tensor
from torch.nn import functional

from slime_core.errors import ConfigError

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
GLM4_MOE_EXPERTS = {
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 16,
    "attention_bias": True,
}
QWEN3_MOE_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "head_dim": 16,
}
QWEN3_NEXT_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
}

MEGATRON_MODELS = {
    "deepseek_v3": {"config": {**LATENT, **EXPERTS}},
    "deepseek_v3: moonlight": {
        "config": {**LATENT, **EXPERTS, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "n_shared_experts": 2}
    },
    "glm4": {"config": {"head_dim": 8, "pad_token_id": None}},
    "glm4: without biases": {"config": {"head_dim": 16, "attention_bias": False, "pad_token_id": None}},
    "glm4_moe": {"config": {**GLM4_MOE_EXPERTS, "use_qk_norm": True, "head_dim": 8}},
    "glm4_moe: air": {"config": {**GLM4_MOE_EXPERTS, "n_group": 4, "topk_group": 2, "n_shared_experts": 2}},
    "glm4_moe_lite": {
        "config": {
            **{name: value for name, value in {**LATENT, **EXPERTS}.items() if "group" not in name},
            "v_head_dim": 16,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
        }
    },
    "kimi_k2": {
        "reference": "deepseek_v3",
        "config": {**LATENT, **EXPERTS, "v_head_dim": 8, "n_routed_experts": 12, "n_group": 1, "topk_group": 1},
    },
    "llama": {},
    "minimax_m2": {"config": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "rotary_dim": 8}},
    "qwen2: tied": {"config": {"tie_word_embeddings": True, "num_key_value_heads": 4}},
    "qwen3: tied": {"config": {"tie_word_embeddings": True}},
    "qwen3_next": {"config": {**LINEAR, **QWEN3_NEXT_EXPERTS, "num_hidden_layers": 4}},
    "qwen3_next: with dense layers and other intervals": {
        "config": {
            **LINEAR,
            **QWEN3_NEXT_EXPERTS,
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
            "mlp_only_layers": [1],
            "norm_topk_prob": False,
            "tie_word_embeddings": True,
        }
    },
}
MODELS = {
    "llava": None,  # test_vision_language.py
    "qwen2_vl": None,
    "qwen2_5_vl": None,
    "qwen3_vl": None,
    "llama: tied": {"config": {"tie_word_embeddings": True, "num_key_value_heads": 4}},
    "qwen2: tied": {"config": {"tie_word_embeddings": True, "num_key_value_heads": 4}},
    "qwen3: tied": {"config": {"tie_word_embeddings": True, "num_key_value_heads": 4}},
    "qwen3_moe": {"config": QWEN3_MOE_EXPERTS},
    "qwen3_moe: with dense layers and plain probabilities": {
        "config": {
            **QWEN3_MOE_EXPERTS,
            "num_hidden_layers": 4,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [1],
            "norm_topk_prob": False,
            "tie_word_embeddings": True,
        }
    },
}


class TestLlamaBiases(MegatronModelContract):
    component = "llama"
    config = {"attention_bias": True, "mlp_bias": True}

    def test_megatron_has_biases_everywhere_or_nowhere(self) -> None:
        with pytest.raises(ConfigError, match="attention_bias True with mlp_bias False is not supported"):
            self.resolved.obj({**self.hf, "mlp_bias": False})


class TestLlama3(MegatronModelContract):
    component = "llama"
    config = {
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    }

    def test_scaling_is_read_and_others_are_refused(self) -> None:
        architecture = self.megatron_model.architecture
        assert architecture.rotary_base == 500000.0
        assert architecture.rope_scaling is not None
        assert architecture.rope_scaling["factor"] == 8.0
        with pytest.raises(ConfigError, match="rope type 'linear' is not supported"):
            self.resolved.obj({**self.hf, "rope_parameters": {"rope_type": "linear", "factor": 2.0}})


class TestMimo(MegatronModelContract):
    component = "mimo"
    reference = "qwen2"

    def test_layers_of_multi_token_prediction_are_carried(self) -> None:
        (pattern,) = self.megatron_model.carried
        assert re.fullmatch(pattern, "model.mtp_layers.0.self_attn.q_proj.weight")
        assert not re.fullmatch(pattern, "model.layers.0.self_attn.q_proj.weight")


def test_what_is_not_computed_is_refused() -> None:
    hf = TestMimo().hf
    with pytest.raises(ConfigError, match="use_sliding_window True is not supported"):
        mimo_megatron({**hf, "use_sliding_window": True})
    assert not mimo_megatron({**hf, "attention_bias": False}).architecture.transformer["add_qkv_bias"]


class TestQwen3Moe(MegatronModelContract):
    component = "qwen3_moe"
    config = {**QWEN3_MOE_EXPERTS, "num_experts": 4}

    def test_probabilities_are_normalized_as_in_the_file(self) -> None:
        fields = self.megatron_model.architecture.transformer
        assert not fields["moe_router_pre_softmax"]
        assert self.resolved.obj({**self.hf, "norm_topk_prob": False}).architecture.transformer[
            "moe_router_pre_softmax"
        ]


class TestQwen3MoeMixed(MegatronModelContract):
    component = "qwen3_moe"
    config = {**QWEN3_MOE_EXPERTS, "num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [1]}

    def test_which_layers_have_experts(self) -> None:
        assert self.megatron_model.architecture.transformer["moe_layer_freq"] == [0, 0, 0, 1]


globals().update(suites("megatron_models", "slime_models", MEGATRON_MODELS, globals()))
globals().update(suites("models", "slime_models", MODELS, globals()))


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
    model = megatron(V3)
    fields, (carried,) = model.architecture.transformer, model.carried
    assert re.fullmatch(carried, "model.layers.61.eh_proj.weight")
    assert not re.fullmatch(carried, "model.layers.6.mlp.gate.weight")
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


def test_older_and_newer_names_of_rotary_positions_mean_the_same() -> None:
    newer = {name: value for name, value in V3.items() if name not in ("rope_scaling", "rope_theta")}
    scaling = {name: value for name, value in YARN.items() if name != "type"}
    newer["rope_parameters"] = {**scaling, "rope_type": "yarn", "rope_theta": 10000}
    assert megatron(newer).architecture == megatron(V3).architecture


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported; allowed: 'sigmoid'"),
        ({"topk_method": "greedy"}, "topk_method"),
        ({"norm_topk_prob": False}, "norm_topk_prob"),
        ({"rope_interleave": False}, "rope_interleave"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_scaling": {**YARN, "attention_factor": 1.0}}, "attention_factor"),
        ({"num_experts_per_tok": 1}, "allowed: 2 to 256"),
        ({"num_experts_per_tok": 12}, "allowed: two experts per group"),
        ({"n_group": 3}, "does not fit 256 experts"),
        ({"first_k_dense_replace": 62}, "allowed: 0 to 61"),
        ({"attention_bias": True}, "attention_bias"),
        ({"rope_scaling": {**YARN, "type": "linear"}}, "rope type 'linear' is not supported; allowed: default, yarn"),
        ({"rope_scaling": {**YARN, "mscale": 0}}, "mscale_all_dim of YaRN without mscale"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "'original_max_position_embeddings'"),
    ],
)
def test_what_megatron_does_not_compute_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        megatron({**V3, **change})


def test_a_missing_field_is_named() -> None:
    with pytest.raises(ConfigError, match="kv_lora_rank"):
        megatron({name: value for name, value in V3.items() if name != "kv_lora_rank"})


# THUDM/GLM-4-9B-0414, from config.json.
GLM4 = {
    "model_type": "glm4", "vocab_size": 151552, "hidden_size": 4096, "intermediate_size": 13696,
    "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128,
    "attention_bias": True, "partial_rotary_factor": 0.5, "rope_theta": 10000.0, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 32768, "tie_word_embeddings": False,
}  # fmt: skip


def test_the_numbers_of_glm_4() -> None:
    architecture = glm4_megatron(GLM4).architecture
    fields = architecture.transformer
    assert (architecture.rotary_percent, fields["rotary_interleaved"]) == (0.5, True)
    assert (fields["add_qkv_bias"], fields["add_bias_linear"], fields["qk_layernorm"]) == (True, False, False)


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
    model = glm4_moe_megatron(GLM45)
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
def test_what_megatron_does_not_compute_of_glm4_moe_is_refused(change: dict[str, Any], message: str) -> None:
    hf = {name: value for name, value in {**GLM45, **change}.items() if value is not None}
    with pytest.raises(ConfigError, match=message):
        glm4_moe_megatron(hf)


# zai-org/GLM-4.7-Flash, from config.json.
FLASH = {
    "model_type": "glm4_moe_lite", "vocab_size": 154880, "hidden_size": 2048, "intermediate_size": 10240,
    "moe_intermediate_size": 1536, "num_hidden_layers": 47, "num_attention_heads": 20, "num_key_value_heads": 20,
    "n_routed_experts": 64, "n_shared_experts": 1, "num_experts_per_tok": 4, "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.8, "q_lora_rank": 768, "kv_lora_rank": 512, "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64, "v_head_dim": 256, "rope_theta": 1000000.0, "max_position_embeddings": 202752,
}  # fmt: skip


def test_dense_layers_by_number_or_by_name() -> None:
    by_number = glm4_moe_lite_megatron(FLASH).architecture
    assert by_number.transformer["moe_layer_freq"] == [0] + [1] * 46
    assert glm4_moe_lite_megatron({**FLASH, "mlp_layer_types": ["dense"] + ["sparse"] * 46}).architecture == by_number
    assert by_number.transformer["layernorm_epsilon"] == 1e-5
    for kinds in (["dense"], ["dense"] + ["mixed"] * 46):
        with pytest.raises(ConfigError, match="'dense' or 'sparse' for each of 47 layers"):
            glm4_moe_lite_megatron({**FLASH, "mlp_layer_types": kinds})


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
    fields = kimi_k2_megatron(K2).architecture.transformer
    expected = {
        "num_moe_experts": 384, "moe_router_topk_scaling_factor": 2.827, "moe_layer_freq": [0] + [1] * 60,
        "rotary_scaling_factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0, "rotary_base": 50000.0,
    }  # fmt: skip
    assert {name: fields[name] for name in expected} == expected
    assert "moe_router_num_groups" not in fields


def config(**changes: Any) -> dict[str, Any]:
    """As released: MiniMax-M2 names some fields otherwise than transformers does."""
    released = {
        "model_type": "minimax_m2", "vocab_size": 200064, "hidden_size": 3072, "intermediate_size": 1536,
        "num_hidden_layers": 62, "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128,
        "rotary_dim": 64, "rope_theta": 5000000, "num_local_experts": 256, "num_experts_per_tok": 8,
        "scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True, "qk_norm_type": "per_layer",
        "shared_intermediate_size": 0, "num_mtp_modules": 3, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    }  # fmt: skip
    return {**released, **changes}


def test_the_released_model() -> None:
    model = minimax_m2_megatron(config())
    architecture, fields = model.architecture, model.architecture.transformer
    assert (architecture.rotary_base, architecture.rotary_percent) == (5e6, 0.5)
    assert (fields["num_moe_experts"], fields["moe_router_topk"], fields["moe_ffn_hidden_size"]) == (256, 8, 1536)
    assert fields["moe_router_score_function"] == "sigmoid"
    assert fields["moe_router_enable_expert_bias"]
    names = [name for place in places(model) for name in place.hf]
    assert "model.layers.61.block_sparse_moe.experts.255.w2.weight" in names
    assert "model.layers.0.block_sparse_moe.e_score_correction_bias" in names
    assert sum(".q_norm." in name or ".k_norm." in name for name in names) == 124
    ends = ("61.x", "62.x", "64.x", "65.x", "620.x")
    carried = [any(re.fullmatch(pattern, f"model.layers.{end}") for pattern in model.carried) for end in ends]
    assert carried == [False, True, True, False, False], "modules of multi-token prediction"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported for minimax_m2; allowed: 'sigmoid'"),
        ({"shared_intermediate_size": 1024}, "shared_intermediate_size 1024"),
        ({"use_qk_norm": False}, "use_qk_norm False"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"num_experts_per_tok": 1}, "num_experts_per_tok 1 of 256 experts; allowed: 2 to 256"),
    ],
)
def test_what_does_not_fit_is_said(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        minimax_m2_megatron(config(**change))


def config_qwen3_next(**changes: Any) -> dict[str, Any]:
    """As released: Qwen3-Next-80B-A3B names some fields otherwise than transformers does."""
    released = {
        "model_type": "qwen3_next", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5120,
        "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
        "partial_rotary_factor": 0.25, "rope_theta": 10000000, "rope_scaling": None, "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "num_experts": 512, "num_experts_per_tok": 10, "norm_topk_prob": True, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    }  # fmt: skip
    return {**released, **changes}


def test_the_released_qwen3_next() -> None:
    model = qwen3_next_megatron(config_qwen3_next())
    architecture, fields = model.architecture, model.architecture.transformer
    assert (architecture.rotary_base, architecture.rotary_percent) == (1e7, 0.25)
    assert fields["linear_attention_freq"] == [1, 1, 1, 0] * 12
    assert fields["moe_layer_freq"] == [1] * 48
    assert (fields["num_moe_experts"], fields["moe_router_topk"], fields["moe_router_pre_softmax"]) == (512, 10, False)
    for name in ("layernorm_zero_centered_gamma", "attention_output_gate", "qk_layernorm", "moe_shared_expert_gate"):
        assert fields[name] is True, name
    names = {name for place in places(model) for name in place.hf if ".mlp.experts." not in name}
    for kind, expected in (("self_attn.q_proj", 12), ("linear_attn.in_proj_ba", 36), ("mlp.shared_expert_gate", 48)):
        assert sum(kind in name for name in names) == expected, kind


def test_both_ways_to_say_which_layers_have_full_attention() -> None:
    kinds = ["linear_attention", "full_attention"] * 24
    by_kinds = qwen3_next_megatron(config_qwen3_next(layer_types=kinds)).architecture
    by_interval = qwen3_next_megatron(config_qwen3_next(full_attention_interval=2)).architecture
    assert by_kinds.transformer["linear_attention_freq"] == by_interval.transformer["linear_attention_freq"]
    assert by_kinds.extra == by_interval.extra == {"linear": tuple(range(0, 48, 2))}


def test_dense_layers() -> None:
    fields = qwen3_next_megatron(config_qwen3_next(decoder_sparse_step=2, mlp_only_layers=[1])).architecture.transformer
    assert fields["moe_layer_freq"] == [0, 0] + [0, 1] * 23
    assert "num_moe_experts" not in qwen3_next_megatron(config_qwen3_next(num_experts=0)).architecture.transformer


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_bias": True}, "attention_bias true is not supported"),
        ({"linear_num_value_heads": 30}, "linear_num_value_heads 30 is not divisible by linear_num_key_heads 16"),
        ({"num_experts_per_tok": 513}, "num_experts_per_tok 513 of 512 experts; allowed: 1 to 512"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries"),
        ({"layer_types": ["sliding_attention"] * 48}, "sliding_attention"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope type 'yarn'"),
    ],
)
def test_what_does_not_fit_qwen3_next_is_said(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        qwen3_next_megatron(config_qwen3_next(**change))


def test_context_parallelism_is_refused() -> None:
    from slime_trainer_megatron.layout import Layout

    fields = qwen3_next_megatron(config_qwen3_next()).architecture.transformer
    Layout(tensor=4, sequence_parallel=True).check_model(fields)
    with pytest.raises(ConfigError, match="--context-parallel-size 2: Megatron cannot cut gated_delta_net"):
        Layout(context=2).check_model(fields)
    six = qwen3_next_megatron(
        config_qwen3_next(linear_num_key_heads=6, linear_num_value_heads=6)
    ).architecture.transformer
    with pytest.raises(ConfigError, match="does not divide the model's 6 linear key heads"):
        Layout(tensor=4, sequence_parallel=True).check_model(six)


def inputs(tokens: int, *, heads: int = 3, key_dim: int = 8, value_dim: int = 6, decay: float = 1.0) -> list[Tensor]:
    """Query, key, value, decay, beta."""
    generator = torch.Generator().manual_seed(tokens)
    shapes = ((heads, key_dim), (heads, key_dim), (heads, value_dim))
    vectors = [torch.randn(tokens, *shape, generator=generator) for shape in shapes]
    numbers = [torch.rand(tokens, heads, generator=generator) for _ in range(2)]
    return [*vectors, -decay * numbers[0], numbers[1]]


def token_by_token(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """The rule as it is written, one sequence, in float64."""
    query, key, value, decay, beta = (x.double() for x in (query, key, value, decay, beta))
    query, key = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key))
    state = torch.zeros(key.shape[1], key.shape[2], value.shape[2], dtype=torch.float64)
    outputs = []
    for t in range(len(query)):
        state = state * decay[t].exp()[:, None, None]
        read = torch.einsum("hk,hkv->hv", key[t], state)
        state = state + torch.einsum("hk,hv->hkv", key[t], beta[t][:, None] * (value[t] - read))
        outputs.append(torch.einsum("hk,hkv->hv", query[t] * query.shape[-1] ** -0.5, state))
    return torch.stack(outputs)


@pytest.mark.parametrize("tokens", [1, 64, 200])
@pytest.mark.parametrize("decay", [0.1, 8.0])
def test_chunks_are_the_rule_token_by_token(tokens: int, decay: float) -> None:
    given = inputs(tokens, decay=decay)
    torch.testing.assert_close(gated_delta_rule(*given, [tokens]).double(), token_by_token(*given), rtol=0, atol=1e-5)
    exact = gated_delta_rule(*(x.double() for x in given), [tokens])
    torch.testing.assert_close(exact, token_by_token(*given), rtol=0, atol=1e-12)


def test_it_is_transformers_kernel() -> None:
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    query, key, value, decay, beta = (x[None] for x in inputs(150))
    expected, _ = torch_chunk_gated_delta_rule(query, key, value, decay, beta, use_qk_l2norm_in_kernel=True)
    torch.testing.assert_close(gated_delta_rule(*inputs(150), [150]), expected[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("lengths", [[130, 3, 0, 64, 1, 200], []])
def test_packed_sequences_are_separate_ones(lengths: list[int]) -> None:
    given = inputs(sum(lengths))
    packed = gated_delta_rule(*given, lengths)
    assert packed.shape == given[2].shape
    pieces = zip(*(x.split(lengths) for x in given), strict=True)
    separate = [gated_delta_rule(*piece, [len(piece[0])]) for piece in pieces]
    torch.testing.assert_close(packed, torch.cat(separate) if separate else given[2], rtol=0, atol=1e-6)


def test_gradients_are_those_of_finite_differences() -> None:
    given = [x.double().requires_grad_() for x in inputs(5, heads=1, key_dim=2, value_dim=2)]
    assert torch.autograd.gradcheck(lambda *x: gated_delta_rule(*x, [3, 2], chunk_size=2), given)


def test_convolution_looks_back_within_a_sequence_only() -> None:
    lengths = [7, 1, 0, 12]
    tokens, weight = torch.randn(20, 6), torch.randn(6, 4)
    found = causal_conv(tokens, weight, lengths)
    for part, result in zip(tokens.split(lengths), found.split(lengths), strict=True):
        for t in range(len(part)):
            seen = part[max(t - 3, 0) : t + 1]
            expected = (seen * weight[:, 4 - len(seen) :].T).sum(0)
            torch.testing.assert_close(result[t], expected, rtol=0, atol=1e-5)


def test_half_precision_is_computed_in_float32() -> None:
    given = inputs(70)
    low = [x.bfloat16() for x in given]
    expected = gated_delta_rule(*(x.float() for x in low), [70])
    assert torch.equal(gated_delta_rule(*low, [70]), expected)
    assert functional.cosine_similarity(expected.flatten(), gated_delta_rule(*given, [70]).flatten(), 0) > 0.99
