"""Llama 2 and 3 for Megatron-core. Biases on all linear layers or on none: Megatron has no middle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slime_trainer_megatron.families import (
    MegatronModel,
    attention_rows,
    decoder_architecture,
    dense_mlp_rows,
    embedding_rows,
)

from slime_core.errors import ConfigError


def megatron(hf: Mapping[str, Any]) -> MegatronModel:
    """`config.json` of a `LlamaForCausalLM` -> Megatron's model.

    Raises:
        ConfigError: A field is missing, or asks for what Megatron's layers do not have.
    """
    biases = [bool(hf.get(name, False)) for name in ("attention_bias", "mlp_bias")]
    if len(set(biases)) > 1:
        raise ConfigError(
            f"config.json: attention_bias {biases[0]} with mlp_bias {biases[1]} is not supported with"
            " --train-backend megatron; allowed: both or neither"
        )
    architecture = decoder_architecture(hf, add_bias_linear=biases[0])
    rows = [*embedding_rows(architecture), *attention_rows(architecture), *dense_mlp_rows(architecture)]
    return MegatronModel(architecture, rows)
