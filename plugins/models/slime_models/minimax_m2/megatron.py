"""MiniMax-M2 in Megatron's words: the plugin of kind "megatron_models" for `model_type` minimax_m2.

Experts in every layer, by sigmoid scores: those with the highest score plus bias, weighed by their scores alone,
divided by their sum. Rotary positions on half of a head. `qk_layernorm` is off in Megatron's configuration although
there are such norms, because Megatron's own are per head and have their gradients summed over tensor-parallel ranks;
`layer_spec` puts in the family's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from slime_trainer_megatron.families import (
    LAYER,
    Architecture,
    Columns,
    MegatronModel,
    Row,
    attention_rows,
    decoder_architecture,
    embedding_rows,
    expert_rows,
)

from slime_core.errors import ConfigError

MOE = "block_sparse_moe"
"""HF's name of the feed-forward block."""
DEFAULTS = {"head_dim": 128, "num_local_experts": 256, "num_experts_per_tok": 8, "rope_theta": 5_000_000.0}
"""Defaults of fields that `config.json` omits, as in transformers' `MiniMaxM2Config`."""
ONLY = {
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "use_routing_bias": True,
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
    "router_jitter_noise": 0,
    "sliding_window": None,
}
"""Fields with the same value in all released files; another value would mean another model."""


def megatron(hf: Mapping[str, Any]) -> MegatronModel:
    """Return architecture and map for the `config.json` of a `MiniMaxM2ForCausalLM`.

    Raises:
        ConfigError: A field is missing, contradicts the others or needs a computation that this family does not have.
    """
    hf = {**DEFAULTS, **hf}
    for name, value in ONLY.items():
        if name in hf and hf[name] != value:
            raise ConfigError(f"config.json: {name} {hf[name]!r} is not supported for minimax_m2; allowed: {value!r}")
    if hf.get("rotary_dim") is not None:
        hf.setdefault("partial_rotary_factor", hf["rotary_dim"] / hf["head_dim"])
    architecture = decoder_architecture(hf, **_expert_fields(hf))
    rows = [
        *embedding_rows(architecture),
        *attention_rows(architecture),
        *_qk_norm_rows(),
        *expert_rows(mlp=MOE, names=("w1", "w3", "w2"), expert_bias="e_score_correction_bias"),
    ]
    return MegatronModel(architecture, rows, layer_spec, carried=_carried(hf))


def layer_spec(spec: Any, config: Any, architecture: Architecture, layer: int) -> Any:
    """Insert the norms of queries and keys.

    Raises:
        ConfigError: Tensor parallelism would cut a group of query heads.
    """
    from megatron.core.transformer.spec_utils import ModuleSpec

    from slime_models.minimax_m2.full_width_norm import FullWidthNorm

    if config.num_query_groups % config.tensor_model_parallel_size:
        raise ConfigError(
            f"--tensor-model-parallel-size {config.tensor_model_parallel_size} does not divide num_key_value_heads "
            f"{config.num_query_groups} of config.json, over which the norm of keys is split"
        )
    attention = spec.submodules.self_attention
    norms = {
        "q_layernorm": ModuleSpec(module=FullWidthNorm, params={"num_heads": config.num_attention_heads}),
        "k_layernorm": ModuleSpec(module=FullWidthNorm, params={"num_heads": config.num_query_groups}),
    }
    attention = replace(attention, submodules=replace(attention.submodules, **norms))
    return replace(spec, submodules=replace(spec.submodules, self_attention=attention))


def _qk_norm_rows() -> list[Row]:
    ours = "decoder.layers.{layer}.self_attention."
    return [Row(f"{ours}{x}_layernorm.weight", (f"{LAYER}self_attn.{x}_norm.weight",), Columns()) for x in ("q", "k")]


def _expert_fields(hf: Mapping[str, Any]) -> dict[str, Any]:
    number, per_token = int(hf["num_local_experts"]), int(hf["num_experts_per_tok"])
    if not 1 < per_token <= number:  # with one chosen expert, Megatron would not normalise its score
        raise ConfigError(f"config.json: num_experts_per_tok {per_token} of {number} experts; allowed: 2 to {number}")
    return {
        "num_moe_experts": number,
        "moe_ffn_hidden_size": int(hf.get("intermediate_size") or 0),
        "moe_router_topk": per_token,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_dtype": "fp32",  # many bfloat16 scores would be equal
        "moe_router_bias_update_rate": 0.0,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
    }


def _carried(hf: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the modules of multi-token prediction, whose numbers follow those of the layers."""
    first = int(hf["num_hidden_layers"])
    return tuple(rf"model\.layers\.{first + i}\..*" for i in range(int(hf.get("num_mtp_modules") or 0)))
