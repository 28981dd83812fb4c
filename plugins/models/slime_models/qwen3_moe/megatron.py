"""Qwen3-MoE for Megatron-core: Qwen3's attention, and in most layers routed experts instead of one block.

Probabilities of the chosen experts that sum to one (`norm_topk_prob`) are Megatron's softmax after the choice; others
its softmax before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slime_trainer_megatron.families import (
    MegatronModel,
    attention_rows,
    decoder_architecture,
    dense_mlp_rows,
    embedding_rows,
    expert_rows,
    refuse,
)

from slime_models.qwen3_moe import model


def megatron(hf: Mapping[str, Any]) -> MegatronModel:
    """`config.json` of a `Qwen3MoeForCausalLM` -> Megatron's model.

    Raises:
        ConfigError: A field is missing, the experts do not fit together, or sliding windows or biases are asked for.
    """
    refuse(hf, attention_bias=False)
    experts = model(hf).moe
    sparse = () if experts is None else experts.layers
    dense = tuple(layer for layer in range(int(hf["num_hidden_layers"])) if layer not in sparse)
    fields: dict[str, Any] = {"qk_layernorm": True}
    if experts is not None:
        fields |= {
            "num_moe_experts": experts.num_experts,
            "moe_ffn_hidden_size": experts.intermediate_size,
            "moe_router_topk": experts.experts_per_token,
            "moe_layer_freq": [int(layer in sparse) for layer in range(int(hf["num_hidden_layers"]))],
            "moe_router_score_function": "softmax",
            "moe_router_pre_softmax": not experts.normalize_top_k,
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
        }
    architecture = decoder_architecture({"head_dim": 128, **hf}, **fields)
    rows = [*embedding_rows(architecture), *attention_rows(architecture)]
    rows += dense_mlp_rows(architecture, layers=dense) if dense else []
    rows += expert_rows(layers=sparse) if sparse else []
    return MegatronModel(architecture, rows)
