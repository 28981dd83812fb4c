"""Which parameters of a model an embedded trainer optimizes: all, those that the lists choose, or the adapters.

Called once, when `EmbeddedTrainer` is built; the others are frozen.
"""

from __future__ import annotations

import logging

import torch

from slime_core.errors import ConfigError
from slime_core.models.decoder import Decoder
from slime_core.trainers.embedded.settings import TrainerSettings

logger = logging.getLogger(__name__)


def trained_parameters(model: Decoder, settings: TrainerSettings) -> list[tuple[str, torch.nn.Parameter]]:
    """Names and parameters to optimize; freezes the others. Raises ConfigError when none is left."""
    if settings.only_train and settings.freeze:
        raise ConfigError("--only-train-params-name-list and --freeze-params-name-list: give one of the two")
    trained, names = [], list[tuple[str]]()
    for name, parameter in model.named_parameters():
        if settings.lora is not None and not parameter.requires_grad:
            continue  # all but the adapters is frozen
        names.append((name,))
        parameter.requires_grad_(settings.trains(name))
        if parameter.requires_grad:
            trained.append((name, parameter))
    for warning in settings.check_lists(names):
        logger.warning("%s", warning)
    return trained
