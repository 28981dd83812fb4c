"""A directory in Hugging Face layout -> the model to train, or one that stays as it is.

Called by `EmbeddedTrainer`. What a reader would get wrong: a teacher may be of another architecture than the actor.
"""

from __future__ import annotations

import torch

from slime_core.models.config import load_model_config
from slime_core.models.decoder import Decoder
from slime_core.models.hf_io import read_weights
from slime_core.models.vision_language import VisionLanguageModel
from slime_core.trainers.embedded.settings import TrainerSettings


def load_model(directory: str, settings: TrainerSettings, device: torch.device) -> Decoder:
    """The model of a directory, on `device`. Raises ConfigError when it cannot be read."""
    config = load_model_config(directory)
    if config.images:
        return VisionLanguageModel.from_directory(config, directory, device)
    weights = read_weights(directory, device)
    return Decoder.from_weights(config, weights, device, recompute=settings.recompute, origin=directory)
