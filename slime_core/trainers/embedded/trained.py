"""Which parameters of a model an embedded trainer optimizes: all, those that the lists choose, or the adapters.

Called once, when `EmbeddedTrainer` is built; the others are frozen.
"""

from __future__ import annotations

import logging

import torch

from slime_core.models.decoder import Decoder
from slime_core.trainers.embedded.settings import TrainerSettings

logger = logging.getLogger(__name__)


def trained_parameters(model: Decoder, settings: TrainerSettings) -> list[tuple[str, torch.nn.Parameter]]:
    """Names and parameters to optimize; freezes the others. Raises as `CommonSettings.trained`."""
    trainable = {
        name: parameter
        for name, parameter in model.named_parameters()
        if settings.lora is None or parameter.requires_grad  # all but the adapters is frozen
    }
    chosen, warnings = settings.trained([(name, "") for name in trainable])
    for name, parameter in trainable.items():
        parameter.requires_grad_(name in chosen)
    for warning in warnings:
        logger.warning("%s", warning)
    return [(name, parameter) for name, parameter in trainable.items() if name in chosen]
