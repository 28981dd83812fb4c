"""Vision-language families whose model is built by transformers: LLaVA, Qwen2-VL, Qwen2.5-VL, Qwen3-VL.

The sizes are those of the language model inside, which `config.json` nests under `text_config`; vision tower and
projector are transformers' own business.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from slime_core.errors import ConfigError
from slime_core.models.config import ModelConfig

if TYPE_CHECKING:
    import torch
    from slime_embedded.models.decoder import Decoder


def model(hf: Mapping[str, Any]) -> ModelConfig:
    """`config.json` of a vision-language model -> its language model's sizes. Raises ConfigError."""
    text = hf.get("text_config")
    if not isinstance(text, Mapping):
        raise ConfigError("config.json has no 'text_config', which a vision-language model needs")
    if not isinstance(hf.get("vision_config"), Mapping):
        raise ConfigError("config.json has no 'vision_config', which a vision-language model needs")
    tied = bool(hf.get("tie_word_embeddings", text.get("tie_word_embeddings", False)))
    found = ModelConfig.from_hf({**text, "model_type": hf.get("model_type"), "tie_word_embeddings": tied})
    return replace(found, images=True, build=_build, hf=dict(hf))


def _build(config: ModelConfig, directory: str, device: torch.device) -> Decoder:
    from slime_models.vision_language.trained import VisionLanguageModel

    return VisionLanguageModel.from_directory(config, directory, device)
