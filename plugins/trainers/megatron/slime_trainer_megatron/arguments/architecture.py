"""The architecture that flags state, against the one that config.json has.

Called by `checks.py` before anything starts; imports neither torch nor Megatron. The model is always config.json's:
flags that agree are fine and change nothing, flags that do not are one error with all of them. What was not given is
not compared, although in Megatron the absence of a flag is a statement, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from slime_core.errors import ConfigError
from slime_core.protocols import Args
from slime_trainer_megatron.arguments.fields import known_fields
from slime_trainer_megatron.arguments.flags import shown
from slime_trainer_megatron.arguments.values import given, given_fields
from slime_trainer_megatron.families.family import Architecture

COMPARED: Mapping[str, str] = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_key_value_heads",
    "kv_channels": "head_dim",
    "add_bias_linear": "",
    "add_qkv_bias": "attention_bias",
    "qk_layernorm": "use_qk_norm",
    "qk_l2_norm": "",
    "gated_linear_unit": "hidden_act",
    "glu_linear_offset": "",
    "activation_func_clamp_value": "",
    "normalization": "",
    "layernorm_epsilon": "rms_norm_eps",
    "layernorm_zero_centered_gamma": "",
    "apply_residual_connection_post_layernorm": "",
    "attention_output_gate": "",
    "apply_query_key_layer_scaling": "",
    "softmax_scale": "",
    "softmax_type": "",
    "window_size": "sliding_window",
    "window_attn_skip_freq": "",
    "no_rope_freq": "",
    "rotary_interleaved": "",
    "rotary_base": "rope_theta",
    "rotary_percent": "partial_rotary_factor",
    "rotary_scaling_factor": "rope_scaling.factor",
    "original_max_position_embeddings": "rope_scaling.original_max_position_embeddings",
    "beta_fast": "rope_scaling.beta_fast",
    "beta_slow": "rope_scaling.beta_slow",
    "mscale": "rope_scaling.mscale",
    "mscale_all_dim": "rope_scaling.mscale_all_dim",
    "rope_type": "rope_scaling.rope_type",
    "mrope_section": "rope_scaling.mrope_section",
    "multi_latent_attention": "kv_lora_rank",
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_head_dim": "qk_nope_head_dim",
    "qk_pos_emb_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
    "experimental_attention_variant": "",
    "linear_attention_freq": "full_attention_interval",
    "linear_conv_kernel_dim": "linear_conv_kernel_dim",
    "linear_key_head_dim": "linear_key_head_dim",
    "linear_value_head_dim": "linear_value_head_dim",
    "linear_num_key_heads": "linear_num_key_heads",
    "linear_num_value_heads": "linear_num_value_heads",
    "dsa_indexer_n_heads": "index_n_heads",
    "dsa_indexer_head_dim": "index_head_dim",
    "dsa_indexer_topk": "index_topk",
    "num_moe_experts": "num_experts or n_routed_experts",
    "moe_layer_freq": "first_k_dense_replace",
    "moe_ffn_hidden_size": "moe_intermediate_size",
    "moe_shared_expert_intermediate_size": "shared_expert_intermediate_size or n_shared_experts",
    "moe_shared_expert_gate": "",
    "moe_latent_size": "",
    "moe_router_topk": "num_experts_per_tok",
    "moe_router_num_groups": "n_group",
    "moe_router_group_topk": "topk_group",
    "moe_router_topk_limited_devices": "",
    "moe_router_score_function": "scoring_func",
    "moe_router_topk_scaling_factor": "routed_scaling_factor",
    "moe_router_pre_softmax": "norm_topk_prob",
    "moe_router_enable_expert_bias": "topk_method",
    "moe_apply_probs_on_input": "",
}
"""Field that describes the model -> what config.json calls it, where one name does; `config.py` takes the model's."""

_ONLY_LATENT = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
_NOT_LATENT = ("kv_channels", "num_query_groups", "add_qkv_bias")
_YARN = ("original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
_NONE_IS: Mapping[str, Any] = {
    "moe_router_num_groups": 1,
    "moe_router_group_topk": 1,
    "moe_router_topk_scaling_factor": 1.0,
    "moe_shared_expert_intermediate_size": 0,
}
"""Field -> the value that says the same as its absence."""


def check_architecture(args: Args, hf: Mapping[str, Any], architecture: Architecture) -> None:
    """Compare every architecture flag that was given with the model's own numbers.

    Args:
        args: The run's settings; flags that were not given are not compared.
        hf: The parsed config.json, to say what it calls them.
        architecture: The same in Megatron's words.

    Raises:
        ConfigError: Flags contradict config.json; one message with every mismatch and both values.
    """
    if found := mismatches(args, hf, architecture):
        lines = "\n".join(f"  {line}" for line in found)
        raise ConfigError(
            f"flags contradict the model's config.json, which is what is trained; remove or correct them:\n{lines}"
        )


def mismatches(args: Args, hf: Mapping[str, Any], architecture: Architecture) -> list[str]:
    """Return every flag that config.json contradicts, with both values. Arguments of `check_architecture`."""
    return [*_of_fields(given_fields(args), hf, architecture), *_of_names(args, architecture)]


def _of_fields(given: Mapping[str, Any], hf: Mapping[str, Any], architecture: Architecture) -> Iterator[str]:
    latent = bool(architecture.transformer.get("multi_latent_attention"))
    for name, hf_name in COMPARED.items():
        if name not in given or _means_nothing(name, architecture, latent):
            continue
        if name in _ONLY_LATENT and not latent:
            found: Any = None
        else:
            found = _model_value(name, hf, architecture)
        if not _same(name, given[name], found, architecture.num_layers):
            known_as = f" ({hf_name})" if hf_name else ""
            flag = shown(name, _shown(given[name]))
            yield f"{flag}: the model has {'none' if found is None else _shown(found)}{known_as}"


def _means_nothing(name: str, architecture: Architecture, latent: bool) -> bool:
    """Fields that say nothing about this model, whatever their value."""
    model = architecture.transformer
    if name == "ffn_hidden_size":  # of dense layers; with experts everywhere the number in config.json is idle
        return architecture.num_experts > 0 and all(_layers(model.get("moe_layer_freq", 1), architecture.num_layers))
    if name == "moe_router_pre_softmax":
        return bool(model.get("moe_router_score_function", "softmax") != "softmax")
    if name in _YARN:
        return bool(model.get("rope_type") != "yarn")
    return latent and name in _NOT_LATENT


def _model_value(name: str, hf: Mapping[str, Any], architecture: Architecture) -> Any:
    model = architecture.transformer
    if name in ("rotary_base", "rotary_percent"):
        return getattr(architecture, name)
    if name == "rotary_scaling_factor" and name not in model:
        return (architecture.rope_scaling or {}).get("factor", 1.0)
    if name == "rope_type" and name not in model:
        return "rope"
    if name == "qk_layernorm" and hf.get("use_qk_norm"):  # norms that a family puts in by itself
        return True
    if name == "moe_router_topk" and not architecture.num_experts:
        return None
    if name == "multi_latent_attention":
        return bool(model.get(name))
    return model.get(name, known_fields().fields[name].default)


def _same(name: str, given: Any, found: Any, num_layers: int) -> bool:
    if name in _NONE_IS:
        given, found = (_NONE_IS[name] if value is None else value for value in (given, found))
    if name == "moe_layer_freq":
        return _layers(given, num_layers) == _layers(found, num_layers)
    if name == "linear_attention_freq" and given is not None and found is not None:
        return _linear_layers(given, num_layers) == _linear_layers(found, num_layers)
    if isinstance(given, int | float) and isinstance(found, int | float) and not isinstance(given, bool):
        return math.isclose(given, found, rel_tol=1e-6)
    if isinstance(given, list | tuple) and isinstance(found, list | tuple):
        return list(given) == list(found)
    return bool(given == found)


def _layers(freq: Any, num_layers: int) -> list[int]:
    """`moe_layer_freq` -> 1 for every layer with experts, as Megatron reads it."""
    return [int(i % freq == 0) for i in range(num_layers)] if isinstance(freq, int) and freq else list(freq or [])


def _linear_layers(freq: Any, num_layers: int) -> list[int]:
    """`linear_attention_freq` -> 1 for every layer with linear attention, as Megatron reads it."""
    return [int((i + 1) % freq != 0) for i in range(num_layers)] if isinstance(freq, int) and freq else list(freq or [])


def _shown(value: Any) -> Any:
    """Lists of layers as scripts write them: [0]*3+[1]*58."""
    if not isinstance(value, list) or len(value) < 4:
        return value
    runs: list[list[Any]] = []
    for item in value:
        if runs and runs[-1][0] == item:
            runs[-1][1] += 1
        else:
            runs.append([item, 1])
    return "+".join(f"[{item}]*{count}" for item, count in runs) if len(runs) < len(value) else value


def _activation(architecture: Architecture, name: str, *, gated: bool) -> bool:
    model = architecture.transformer
    found = getattr(model.get("activation_func"), "__name__", "gelu")
    return bool(found == name) and bool(model.get("gated_linear_unit")) is gated


def _of_names(args: Args, architecture: Architecture) -> Iterator[str]:
    """The flags without a field (`flag_names.STATED`)."""
    model, scaling = architecture.transformer, architecture.rope_scaling
    latent, heads = bool(model.get("multi_latent_attention")), model.get("num_attention_heads")
    groups = model.get("num_query_groups") or heads
    statements: Mapping[str, tuple[Callable[[Any], bool], Any]] = {
        "swiglu": (lambda v: v is _activation(architecture, "silu", gated=True), "another activation"),
        "squared_relu": (lambda v: v is _activation(architecture, "squared_relu", gated=False), "another activation"),
        "quick_geglu": (lambda v: v is _activation(architecture, "quick_gelu", gated=True), "another activation"),
        # Where the number of groups is given it is compared; with one head to a group the switch says nothing wrong.
        "group_query_attention": (
            lambda v: latent or given(args, "num_query_groups") is not None or v is (groups != heads),
            f"{groups} key-value heads for {heads} heads",
        ),
        "untie_embeddings_and_output_weights": (
            lambda v: v is not architecture.tie_word_embeddings,
            f"tie_word_embeddings {architecture.tie_word_embeddings}",
        ),
        "position_embedding_type": (lambda v: v == "rope", "rope"),
        "use_rotary_position_embeddings": (bool, "rope"),
        "no_position_embedding": (bool, "rope"),
        "use_rope_scaling": (lambda v: v is (scaling is not None), f"rope_scaling {scaling}"),
        "rope_scaling_factor": (
            lambda v: scaling is not None and math.isclose(v, float(scaling.get("factor", 1.0))),
            f"rope_scaling {scaling}",
        ),
        "full_attention_interval": (
            lambda v: _same("linear_attention_freq", v, model.get("linear_attention_freq"), architecture.num_layers),
            _shown(model.get("linear_attention_freq")),
        ),
        "vocab_size": (lambda v: v == architecture.vocab_size, f"{architecture.vocab_size} (vocab_size)"),
        "max_position_embeddings": (
            lambda v: v == architecture.max_position_embeddings,
            f"{architecture.max_position_embeddings} (max_position_embeddings)",
        ),
    }
    for name, (agrees, found) in statements.items():
        value = given(args, name)
        if value is not None and not agrees(value):
            yield f"{shown(name, value)}: the model has {found}"
