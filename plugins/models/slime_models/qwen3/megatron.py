"""Qwen3 for Megatron-core: RMSNorm over head_dim on queries and keys, before the rotation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slime_trainer_megatron.families import (
    MegatronModel,
    attention_rows,
    decoder_architecture,
    dense_mlp_rows,
    embedding_rows,
    refuse,
)


def megatron(hf: Mapping[str, Any]) -> MegatronModel:
    """`config.json` of a `Qwen3ForCausalLM` -> Megatron's model.

    Raises:
        ConfigError: A field is missing, or sliding windows or biases are asked for.
    """
    refuse(hf, use_sliding_window=False, attention_bias=False)
    architecture = decoder_architecture({"head_dim": 128, **hf}, qk_layernorm=True)
    rows = [*embedding_rows(architecture), *attention_rows(architecture), *dense_mlp_rows(architecture)]
    return MegatronModel(architecture, rows)
