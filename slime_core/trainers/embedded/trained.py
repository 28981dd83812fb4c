"""Which parameters of a model an embedded trainer optimizes: all, those that the lists choose, or the adapters.

Called once, when `EmbeddedTrainer` is built; the others are frozen.
"""

from __future__ import annotations

import torch

from slime_core.errors import ConfigError
from slime_core.models.decoder import Decoder
from slime_core.trainers.embedded.settings import TrainerSettings


def trained_parameters(model: Decoder, settings: TrainerSettings) -> list[tuple[str, torch.nn.Parameter]]:
    """Names and parameters to optimize; freezes the others. Raises ConfigError when none is left."""
    if settings.only_train and settings.freeze:
        raise ConfigError("--only-train-params-name-list and --freeze-params-name-list: give one of the two")
    trained = []
    for name, parameter in model.named_parameters():
        may = settings.lora is None or parameter.requires_grad  # else all but the adapters is frozen
        parameter.requires_grad_(may and settings.trains(name))
        if parameter.requires_grad:
            trained.append((name, parameter))
    if not trained:
        flag = "--only-train-params-name-list" if settings.only_train else "--freeze-params-name-list"
        raise ConfigError(f"{flag}: no parameter is left to train; names look like {name}")
    return trained
