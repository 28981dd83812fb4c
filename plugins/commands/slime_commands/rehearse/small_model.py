"""A model's `config.json` -> a model of the same architecture with small numbers and random weights.

Layers, heads, experts and widths become few; the vocabulary, the positions and every switch of the family stay, so the
tokenizer, the template and the family's plugin are the run's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime_core.errors import ConfigError, PluginNotFoundError
from slime_core.models.config import load_model_config
from slime_core.models.hf_io import copy_assets, write_config, write_weights

_SIZES: Mapping[str, int] = {
    "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "num_attention_heads": 4, "head_dim": 16, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "index_n_heads": 16, "index_head_dim": 8, "index_topk": 8,
    "num_experts": 8, "n_routed_experts": 8, "num_local_experts": 8, "n_embd": 64, "n_head": 4,
}  # fmt: skip
"""Entry of `config.json` -> its value, where the model's own is larger."""
_AT_MOST: Mapping[str, int] = {
    "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0,
    "n_shared_experts": 1,
}  # fmt: skip
_LEFT_OUT = ("quantization_config", "auto_map", "torch_dtype")
_READ_AS: Mapping[str, str] = {"kimi_k2": "deepseek_v3", "mimo": "qwen2"}
"""Family without a class in transformers -> the family with the same layers."""


def shrink(config: Mapping[str, Any], *, stages: int = 1) -> dict[str, Any]:
    """Return the small model's `config.json`.

    Args:
        config: Contents of the model's `config.json`, or of a preset.
        stages: Pipeline stages, over which layers are to be spread evenly.
    """
    small = {name: value for name, value in config.items() if name not in _LEFT_OUT}
    small["model_type"] = _READ_AS.get(str(small["model_type"]), small["model_type"])
    small["dtype"] = "float32"
    if isinstance(small.get("text_config"), Mapping):
        return {**small, "text_config": _shrink_decoder(small["text_config"], stages)}
    return _shrink_decoder(small, stages)


def _shrink_decoder(config: Mapping[str, Any], stages: int) -> dict[str, Any]:
    heads, groups = config.get("num_attention_heads"), config.get("num_key_value_heads")
    head = config.get("head_dim")
    small = dict(config)
    for name, size in (*_SIZES.items(), *_AT_MOST.items()):
        if isinstance(small.get(name), int):
            small[name] = min(size, small[name])
    if isinstance(groups, int):
        small["num_key_value_heads"] = small["num_attention_heads"] if groups == heads else min(2, groups)
    if isinstance(small.get("rotary_dim"), int):
        small["rotary_dim"] = small["head_dim"] * small["rotary_dim"] // (head or small["rotary_dim"])
    kinds = config.get("layer_types")
    every = config.get("full_attention_interval") or (len(dict.fromkeys(kinds)) if kinds else 1)
    layers = max(2 * stages, every if every % stages == 0 else every * stages)
    for name in ("num_hidden_layers", "n_layer"):
        if isinstance(small.get(name), int):
            small[name] = layers
    for name in ("layer_types", "mlp_layer_types"):
        if small.get(name):
            small[name] = _one_of_each(small[name], layers)
    if small.get("mlp_only_layers"):
        small["mlp_only_layers"] = [0]
    return small


def _one_of_each(kinds: list[str], layers: int) -> list[str]:
    """Return so many layers, with every kind of layer among them."""
    different = list(dict.fromkeys(kinds))
    return [different[number % len(different)] for number in range(layers)]


def write_small_model(source: Path | None, target: Path, config: Mapping[str, Any], seed: int) -> int:
    """Write configuration, tokenizer and random weights; return the number of parameters.

    Args:
        source: Directory with the tokenizer; None for the tokenizer of the demo, with a vocabulary of its own.
        target: Directory to write.
        config: Configuration from `shrink`.
        seed: Seed of the weights.

    Raises:
        ConfigError: The model cannot be built on this machine.
    """
    if source is not None:
        copy_assets(source, target)
    else:
        from slime_commands.init.tiny_model import END, PAD, SPECIAL_TOKENS, write_tokenizer

        own = {
            "vocab_size": write_tokenizer(target),
            "eos_token_id": SPECIAL_TOKENS.index(END),
            "pad_token_id": SPECIAL_TOKENS.index(PAD),
            "bos_token_id": None,
        }
        inner = {"text_config": {**config["text_config"], **own}} if "text_config" in config else {}
        config = {**config, **own, **inner}
    write_config(target, config)
    try:
        from slime_embedded.models.decoder import init_weights

        weights = dict(init_weights(load_model_config(target), seed))
    except PluginNotFoundError:
        return _write_by_transformers(target, config, seed)
    write_weights(target, weights.items())
    return sum(tensor.numel() for tensor in weights.values())


def _write_by_transformers(target: Path, config: Mapping[str, Any], seed: int) -> int:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    own = {name: value for name, value in config.items() if name not in ("model_type", "architectures")}
    try:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            build: Any = AutoModelForCausalLM.from_config
            model = build(AutoConfig.for_model(str(config["model_type"]), **own), dtype=torch.float32)
    except (ValueError, KeyError, ImportError) as error:
        raise ConfigError(f"no small model of the family {config['model_type']!r} can be built: {error}") from error
    model.save_pretrained(target)
    return sum(int(parameter.numel()) for parameter in model.parameters())
