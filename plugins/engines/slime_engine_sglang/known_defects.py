"""Models that SGLang serves wrongly and without a word, or says only in its log that it cannot.

Found by comparing its log-probs with transformers'. `SglangEngine.check_settings` refuses them before anything starts:
training on answers of another model teaches nothing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from slime_core.errors import ConfigError


def check_model(directory: str | None, cited: str) -> None:
    """Raise ConfigError when the model below `directory` is known to be served wrongly.

    Args:
        directory: HF-layout model; one that does not exist yet is not looked at.
        cited: Where the setting came from, for the message.
    """
    path = Path(directory or "") / "config.json"
    if not directory or not path.is_file():
        return
    config = json.loads(path.read_text(encoding="utf-8"))
    if missing := _missing(config):
        raise ConfigError(f"{cited}: SGLang does not start with this model: {missing}")
    problem = _problem(config)
    if problem:
        raise ConfigError(
            f"{cited}: SGLang serves this model wrongly: {problem}; use --rollout-engine embedded, or another model"
        )


def _problem(config: dict[str, Any]) -> str:
    # SGLang chooses its class by `architectures`; that of 0.5.20 and 0.5.23 for this one builds experts in every layer,
    # and always has an output matrix of its own.
    if "Qwen3MoeForCausalLM" in (config.get("architectures") or ()):
        if config.get("mlp_only_layers"):
            return f"it takes the dense layers {config['mlp_only_layers']} (mlp_only_layers) for sparse ones"
        if config.get("decoder_sparse_step", 1) != 1:
            return f"it takes every layer for a sparse one, but decoder_sparse_step is {config['decoder_sparse_step']}"
        if config.get("tie_word_embeddings"):
            return "it does not tie the output matrix to the embeddings (tie_word_embeddings)"
    return ""


def _missing(config: dict[str, Any]) -> str:
    vision = config.get("vision_config") or {}
    kind, named = vision.get("model_type"), config.get("architectures") or ()
    if "LlavaForConditionalGeneration" in named and kind == "clip_vision_model":
        return f"it has no vision tower for a LLaVA's vision_config.model_type {kind!r}; use a Qwen2-VL"
    if "Qwen2VLForConditionalGeneration" in named and "in_chans" not in vision:
        return (
            "its class reads vision_config.in_chans, which config.json lacks, as transformers does not write it; add"
            ' "in_chans": 3'
        )
    return ""
