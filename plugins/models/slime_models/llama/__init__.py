"""Llama 2 and 3: plain grouped-query attention; biases only where `config.json` asks for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slime_core.models.config import ModelConfig


def model(hf: Mapping[str, Any]) -> ModelConfig:
    """`config.json` of a `LlamaForCausalLM` -> architecture."""
    bias = bool(hf.get("attention_bias", False))
    return ModelConfig.from_hf(hf, qkv_bias=bias, o_bias=bias, mlp_bias=bool(hf.get("mlp_bias", False)))
