"""`--model-impl` and a model directory -> the `ModelConfig` from which the embedded trainer and engine build.

"slime" is our own decoder, of the families with a plugin of kind "models"; "transformers" is the model class of
transformers; "auto" takes transformers for the families that have no plugin.
"""

from __future__ import annotations

from pathlib import Path

from slime_core.errors import ConfigError, PluginNotFoundError
from slime_core.models.config import ModelConfig, load_model_config, read_hf_config
from slime_embedded.hf.model import TransformersModel


def model_config(directory: str | Path, implementation: str = "auto") -> ModelConfig:
    """Return the configuration of the model in an HF-layout directory.

    Raises:
        ConfigError: The directory has no model, or the implementation does not support it.
        PluginNotFoundError: Neither slime nor transformers knows the family.
    """
    if implementation == "transformers":
        return transformers_config(directory)
    try:
        return load_model_config(directory)
    except PluginNotFoundError:
        if implementation == "slime" or not is_causal(str(read_hf_config(directory)["model_type"])):
            raise
        return transformers_config(directory)


def is_causal(model_type: str) -> bool:
    """Return whether the installed transformers has a causal language model of the family."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def transformers_config(directory: str | Path) -> ModelConfig:
    """Return the sizes that transformers reads from `config.json`.

    Raises:
        ConfigError: transformers has no causal language model of the family, or the weights are quantised.
    """
    from transformers import AutoConfig

    hf = read_hf_config(directory)
    family = str(hf["model_type"])
    if not is_causal(family):
        raise ConfigError(
            f"{directory}/config.json: the installed transformers has no causal language model of model_type"
            f" {family!r}; a newer release may have it, or write the family's plugin: docs/plugins/models.md"
        )
    if "quantization_config" in hf:
        raise ConfigError(
            f"{directory}/config.json: quantization_config is set, and quantised weights cannot be trained; name a"
            " checkpoint in bfloat16 or float32"
        )
    try:
        whole = AutoConfig.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{directory}/config.json: transformers cannot read it: {error}") from error
    text = whole.get_text_config()

    def size(name: str, default: int) -> int:
        found = getattr(text, name, None) or default  # families spell some names differently, and lack others
        return int(max(found) if isinstance(found, list) else found)

    hidden, heads, eos = size("hidden_size", 0), size("num_attention_heads", 1), text.eos_token_id
    return ModelConfig(
        model_type=family,
        vocab_size=int(text.vocab_size),
        hidden_size=hidden,
        intermediate_size=size("intermediate_size", 4 * hidden),
        num_layers=int(text.num_hidden_layers),
        num_heads=heads,
        num_kv_heads=size("num_key_value_heads", heads),
        head_dim=size("head_dim", hidden // heads),
        rms_norm_eps=0.0,
        rope_theta=0.0,
        rope_scaling=None,
        max_position_embeddings=size("max_position_embeddings", 1 << 20),
        tie_word_embeddings=bool(whole.tie_word_embeddings),
        build=TransformersModel.from_directory,
        eos_token_ids=tuple(eos) if isinstance(eos, list) else (() if eos is None else (int(eos),)),
        hf=hf,
    )
