"""Which layers of a model have routed experts, and how many: what the arrays of routing replay look like.

Of the family's plugin of kind "models"; of a family that has none, as the trainer tells. Arrays have a row for every
layer, dense ones included, as the engines report them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_core.errors import PluginNotFoundError
from slime_core.models.config import load_model_config


@dataclass(frozen=True)
class RoutedLayers:
    """The mixture of experts of one model."""

    num_layers: int
    """Of the decoder, dense ones included."""
    layers: tuple[int, ...]
    """Numbers of those with experts."""
    num_experts: int
    """Of each of them."""
    experts_per_token: int


def routed_layers(directory: str | Path, trainer: Any) -> RoutedLayers:
    """Of an HF-layout model with experts.

    Args:
        directory: With the model's `config.json`.
        trainer: Asked by `routed_layers(directory)`, where it has that.

    Raises:
        ConfigError: `config.json` is not there or is another model's.
        PluginNotFoundError: Nobody knows the family.
    """
    try:
        config = load_model_config(directory)
    except PluginNotFoundError:
        ask = getattr(trainer, "routed_layers", None)
        if ask is None:
            raise
        layers: RoutedLayers = ask(directory)
        return layers
    assert config.moe is not None, "checked at start-up"
    return RoutedLayers(config.num_layers, config.moe.layers, config.moe.num_experts, config.moe.experts_per_token)
