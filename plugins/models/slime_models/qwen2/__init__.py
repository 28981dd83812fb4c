"""Qwen2 and Qwen2.5: biases on the query, key and value projections."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slime_core.errors import ConfigError
from slime_core.models.config import ModelConfig


def model(hf: Mapping[str, Any]) -> ModelConfig:
    """`config.json` of a `Qwen2ForCausalLM` -> architecture. Raises ConfigError for sliding windows."""
    if hf.get("use_sliding_window"):
        raise ConfigError("config.json: use_sliding_window true is not supported; allowed: false")
    return ModelConfig.from_hf(hf, qkv_bias=True)
