"""Qwen3: RMSNorm on queries and keys; no biases unless `config.json` asks for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slime_core.errors import ConfigError
from slime_core.models.config import ModelConfig


def model(hf: Mapping[str, Any]) -> ModelConfig:
    """`config.json` of a `Qwen3ForCausalLM` -> architecture. Raises ConfigError for sliding windows."""
    if hf.get("use_sliding_window"):
        raise ConfigError("config.json: use_sliding_window true is not supported; allowed: false")
    bias = bool(hf.get("attention_bias", False))
    return ModelConfig.from_hf({"head_dim": 128, **hf}, qkv_bias=bias, o_bias=bias, qk_norm=True)
