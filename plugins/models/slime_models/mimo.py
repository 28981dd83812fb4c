"""MiMo-7B for Megatron-core: Qwen2's layers, with multi-token prediction carried from the loaded checkpoint."""

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
    """`config.json` of a `MiMoForCausalLM` -> Megatron's model.

    Raises:
        ConfigError: A field is missing, or sliding windows are asked for.
    """
    refuse(hf, use_sliding_window=False)
    architecture = decoder_architecture(hf, add_qkv_bias=bool(hf.get("attention_bias", True)))
    rows = [*embedding_rows(architecture), *attention_rows(architecture), *dense_mlp_rows(architecture)]
    return MegatronModel(architecture, rows, carried=(r"model\.mtp_layers\..*",))
