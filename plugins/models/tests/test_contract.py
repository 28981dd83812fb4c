"""Hold every component of this distribution to the contract of its kind."""

from __future__ import annotations

import re

import pytest
from slime_models.mimo import megatron
from slime_testing_contracts import MegatronModelContract, suites

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
    },
    "kimi_k2": {
        "reference": "deepseek_v3",
        "config": {
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
        },
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
        megatron({**hf, "use_sliding_window": True})
    assert not megatron({**hf, "attention_bias": False}).architecture.transformer["add_qkv_bias"]


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
