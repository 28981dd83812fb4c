"""Common parts of DeepSeek-V3 and related models in Megatron: latent attention (MLA) and sigmoid routing.

The family plugins (`deepseek_v3`, `kimi_k2`, `glm4_moe_lite`, `glm4_moe`) build their `MegatronModel` from this module.
Rows are not permuted for rotary positions: HF's layout of these models stores them in pairs (`rope_interleave`), and
Megatron's latent attention reads pairs (rope_utils.py `_apply_rotary_pos_emb_bshd`, `multi_latent_attention`). A model
with the other layout is refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from slime_core.errors import ConfigError
from slime_trainer_megatron.families.family import (
    Architecture,
    MegatronModel,
    Row,
    decoder_architecture,
    refuse,
    rope_of,
)
from slime_trainer_megatron.families.weight_map import (
    LAYER,
    Columns,
    Rows,
    Whole,
    dense_mlp_rows,
    embedding_rows,
    expert_rows,
)

LATENT_NORM_EPS = 1e-6
"""Epsilon of the norms on MLA's latents. HF's layers do not pass `rms_norm_eps` to these norms but use RMSNorm's
default (modeling_deepseek_v3.py, `q_a_layernorm`); they differ if `rms_norm_eps` is 1e-5 (Moonlight, GLM-4.7-Flash)."""


def latent_attention_model(hf: Mapping[str, Any], sparse: Sequence[bool], defaults: Mapping[str, Any]) -> MegatronModel:
    """Return the model of a decoder with latent attention and sigmoid-routed experts.

    Args:
        hf: The parsed `config.json`.
        sparse: For each layer, whether it has experts.
        defaults: The family's values of fields that `config.json` may omit.

    Raises:
        ConfigError: A field is missing or has a value that Megatron's layers do not compute.
    """
    hf = {**defaults, **hf}
    refuse(hf, attention_bias=False)
    if hf.get("rope_interleave") is False:
        raise ConfigError("config.json: rope_interleave false is not supported; allowed: true")
    partial = (hf.get("rope_parameters") or {}).get("partial_rotary_factor") or hf.get("partial_rotary_factor")
    if partial not in (None, 1):
        raise ConfigError(f"config.json: partial_rotary_factor {partial} is not supported; allowed: 1.0")
    base, _ = rope_of(hf)
    plain = {**hf, "rope_parameters": None, "rope_scaling": None, "rope_theta": base, "partial_rotary_factor": 1.0}
    architecture = decoder_architecture(plain, **_latent_fields(hf), **_rope_fields(hf), **routing_fields(hf, sparse))
    rows = decoder_rows(architecture, latent_attention_rows(architecture), sparse)
    return MegatronModel(architecture, rows, latent_norm_spec, carried_layers(hf))


def first_dense(hf: Mapping[str, Any], default: int) -> list[bool]:
    """Return for each layer whether it has experts: all layers except the first `first_k_dense_replace`."""
    if hf.get("num_hidden_layers") is None:
        raise ConfigError("config.json has no 'num_hidden_layers', which every decoder needs")
    dense, layers = hf.get("first_k_dense_replace"), int(hf["num_hidden_layers"])
    dense = default if dense is None else int(dense)
    if not 0 <= dense <= layers:
        raise ConfigError(f"config.json: first_k_dense_replace {dense} of {layers} layers; allowed: 0 to {layers}")
    return [layer >= dense for layer in range(layers)]


def routing_fields(hf: Mapping[str, Any], sparse: Sequence[bool]) -> dict[str, Any]:
    """Return the fields of DeepSeek-V3's routing (arXiv:2412.19437, 2.1.2).

    Scores are sigmoids; a bias affects only the choice of experts; the chosen scores are normalised and scaled; experts
    are in groups.

    Raises:
        ConfigError: A field is missing, or requires a choice or normalisation that Megatron's router does not support.
    """
    if not any(sparse):
        return {}
    for name, allowed in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc"), ("moe_layer_freq", 1)):
        if hf.get(name) not in (None, allowed):
            raise ConfigError(f"config.json: {name} {hf[name]!r} is not supported; allowed: {allowed!r}")
    try:
        experts, top_k = int(hf["n_routed_experts"]), int(hf["num_experts_per_tok"])
        width = int(hf["moe_intermediate_size"])
    except KeyError as error:
        raise ConfigError(f"config.json has no {error.args[0]!r}, which a model with experts needs") from error
    if not 2 <= top_k <= experts:
        # Megatron's router does not normalise the score of a single expert (moe_utils.py,
        # `topk_routing_with_score_function`); HF's does.
        raise ConfigError(f"config.json: num_experts_per_tok {top_k} of {experts} experts; allowed: 2 to {experts}")
    if not hf.get("norm_topk_prob", True):
        raise ConfigError("config.json: norm_topk_prob false is not supported with sigmoid routing; allowed: true")
    shared = int(hf.get("n_shared_experts") or 0)
    return {
        "num_moe_experts": experts,
        "moe_ffn_hidden_size": width,
        "moe_layer_freq": [int(has) for has in sparse],
        "moe_shared_expert_intermediate_size": width * shared or None,
        "moe_router_topk": top_k,
        "moe_router_score_function": "sigmoid",
        "moe_router_pre_softmax": True,
        "moe_router_enable_expert_bias": True,
        "moe_router_dtype": "fp32",
        "moe_router_topk_scaling_factor": float(hf.get("routed_scaling_factor") or 1.0),
        **_group_fields(hf, experts, top_k),
    }


def _group_fields(hf: Mapping[str, Any], experts: int, top_k: int) -> dict[str, int]:
    """Return the fields of group-limited routing; empty if tokens choose among all experts."""
    groups, of_token = int(hf.get("n_group") or 1), int(hf.get("topk_group") or 1)
    if groups == of_token:
        return {}
    if experts % groups or not 0 < of_token <= groups:
        raise ConfigError(f"config.json: topk_group {of_token}, n_group {groups}: does not fit {experts} experts")
    if top_k // of_token != 2:
        # HF's score of a group is the sum of its two best, Megatron's of its best `top_k // of_token`.
        raise ConfigError(
            f"config.json: num_experts_per_tok {top_k} in topk_group {of_token} groups is not supported; allowed: "
            "two experts per group"
        )
    return {"moe_router_num_groups": groups, "moe_router_group_topk": of_token}


def _latent_fields(hf: Mapping[str, Any]) -> dict[str, Any]:
    try:
        rank = hf["q_lora_rank"]
        return {
            "multi_latent_attention": True,
            "num_query_groups": int(hf["num_attention_heads"]),
            "q_lora_rank": None if rank is None else int(rank),
            "kv_lora_rank": int(hf["kv_lora_rank"]),
            "qk_head_dim": int(hf["qk_nope_head_dim"]),
            "qk_pos_emb_head_dim": int(hf["qk_rope_head_dim"]),
            "v_head_dim": int(hf["v_head_dim"]),
            "kv_channels": int(hf["qk_nope_head_dim"]),  # not used by latent attention
            "qk_layernorm": True,
        }
    except KeyError as error:
        raise ConfigError(f"config.json has no {error.args[0]!r}, which latent attention needs") from error


def _rope_fields(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of plain rotary positions, or of YaRN (modeling_rope_utils.py `_compute_yarn_parameters`)."""
    base, scaling = rope_of(hf)
    fields = {"rotary_base": base, "rotary_percent": 1.0}
    if scaling is None:
        return {**fields, "rope_type": "rope", "rotary_scaling_factor": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0}
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind != "yarn":
        raise ConfigError(f"config.json: rope type {kind!r} is not supported; allowed: default, yarn")
    if scaling.get("attention_factor") is not None or not scaling.get("truncate", True):
        raise ConfigError("config.json: attention_factor and truncate of YaRN are not supported; leave them out")
    missing = [name for name in ("factor", "original_max_position_embeddings") if scaling.get(name) is None]
    if missing:
        raise ConfigError(f"config.json: rope scaling of type yarn has no {', '.join(map(repr, missing))}")
    mscale, all_dim = (float(scaling.get(name) or 0.0) for name in ("mscale", "mscale_all_dim"))
    if all_dim and not mscale:
        raise ConfigError("config.json: mscale_all_dim of YaRN without mscale is not supported; give both or none")
    return {
        **fields,
        "rope_type": "yarn",
        "rotary_scaling_factor": float(scaling["factor"]),
        "original_max_position_embeddings": int(scaling["original_max_position_embeddings"]),
        "beta_fast": float(scaling.get("beta_fast") or 32),
        "beta_slow": float(scaling.get("beta_slow") or 1),
        "mscale": mscale if all_dim else 1.0,  # HF counts it only together with the other
        "mscale_all_dim": all_dim,
    }


def latent_attention_rows(architecture: Architecture) -> list[Row]:
    """Return the rows of a norm and latent attention.

    Every tensor-parallel rank holds the two projections down to the latents whole
    (trainers/megatron/model/latent_attention.py; the same in Megatron's own with Transformer Engine).
    """
    attention, hf = "decoder.layers.{layer}.self_attention.", f"{LAYER}self_attn."
    query = [Row(f"{attention}linear_q_proj.weight", (f"{hf}q_proj.weight",), Columns())]
    if architecture.transformer["q_lora_rank"] is not None:
        query = [
            Row(f"{attention}linear_q_down_proj.weight", (f"{hf}q_a_proj.weight",), Whole(), "replicated"),
            Row(f"{attention}q_layernorm.weight", (f"{hf}q_a_layernorm.weight",), Whole(), "replicated"),
            Row(f"{attention}linear_q_up_proj.weight", (f"{hf}q_b_proj.weight",), Columns()),
        ]
    norm = "decoder.layers.{layer}.input_layernorm.weight"
    return [
        Row(norm, (f"{LAYER}input_layernorm.weight",), Whole(), "replicated"),
        *query,
        Row(f"{attention}linear_kv_down_proj.weight", (f"{hf}kv_a_proj_with_mqa.weight",), Whole(), "replicated"),
        Row(f"{attention}kv_layernorm.weight", (f"{hf}kv_a_layernorm.weight",), Whole(), "replicated"),
        Row(f"{attention}linear_kv_up_proj.weight", (f"{hf}kv_b_proj.weight",), Columns()),
        Row(f"{attention}linear_proj.weight", (f"{hf}o_proj.weight",), Rows()),
    ]


def decoder_rows(architecture: Architecture, attention: Sequence[Row], sparse: Sequence[bool]) -> list[Row]:
    """Return the rows of embedding, layers with this attention (dense or with experts) and output."""
    embedding, *rest = embedding_rows(architecture)
    dense, routed = (tuple(i for i, has in enumerate(sparse) if has is which) for which in (False, True))
    shared = architecture.transformer.get("moe_shared_expert_intermediate_size")
    rows = [embedding, *attention]
    if dense:
        rows += dense_mlp_rows(architecture, layers=dense)
    if routed:
        rows += expert_rows(
            layers=routed,
            expert_bias="gate.e_score_correction_bias",
            shared="shared_experts" if shared else None,
        )
    return rows + rest


def carried_layers(hf: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the layers after the decoder's, which predict further tokens."""
    first = int(hf["num_hidden_layers"])
    extra = int(hf.get("num_nextn_predict_layers") or hf.get("num_mtp_layers") or 1)
    return tuple(rf"model\.layers\.{layer}\..*" for layer in range(first, first + extra))


def latent_norm_spec(spec: Any, config: Any, architecture: Architecture, layer: int) -> Any:
    """Return the layer with HF's epsilon in the norms on the latents."""
    attention = spec.submodules.self_attention
    attention = dataclasses.replace(attention, params={**attention.params, "latent_norm_eps": LATENT_NORM_EPS})
    return dataclasses.replace(spec, submodules=dataclasses.replace(spec.submodules, self_attention=attention))
