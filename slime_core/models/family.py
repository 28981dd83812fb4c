"""What the core asks of a model's family: the numbers by which samples are balanced over ranks, and its routed experts.

Of the family's plugin of kind "models"; of a family that has none, as the trainer tells.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from slime_core.errors import PluginNotFoundError
from slime_core.models.config import ModelConfig, load_model_config
from slime_core.ops.flops import DecoderShape


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


def decoder_shape(directory: str | Path, trainer: Any) -> DecoderShape:
    """Of an HF-layout model: an estimate for balancing. Raises as `_config_or_answer`.

    Experts count as those that a token goes through, on average over the layers; linear attention as if it were full.
    """
    config = _config_or_answer(directory, trainer, "decoder_shape")
    if not isinstance(config, ModelConfig):
        shape: DecoderShape = config
        return shape
    inner, moe = config.intermediate_size, config.moe
    if moe is not None:
        inner += len(moe.layers) * (moe.experts_per_token * moe.intermediate_size - inner) // config.num_layers
    numbers = {field.name: getattr(config, field.name) for field in fields(DecoderShape)}
    return DecoderShape(**numbers | {"intermediate_size": inner})


def routed_layers(directory: str | Path, trainer: Any) -> RoutedLayers:
    """Of an HF-layout model with experts: what the arrays of routing replay look like. Raises as `_config_or_answer`.

    Arrays have a row for every layer, dense ones included, as the engines report them.
    """
    config = _config_or_answer(directory, trainer, "routed_layers")
    if not isinstance(config, ModelConfig):
        layers: RoutedLayers = config
        return layers
    assert config.moe is not None, "checked at start-up"
    return RoutedLayers(config.num_layers, config.moe.layers, config.moe.num_experts, config.moe.experts_per_token)


def _config_or_answer(directory: str | Path, trainer: Any, question: str) -> Any:
    """The model's `ModelConfig`; of a family without plugin, what the trainer's method `question` answers.

    Raises:
        ConfigError: `config.json` is not there or is another model's.
        PluginNotFoundError: Nobody knows the family.
    """
    try:
        return load_model_config(directory)
    except PluginNotFoundError:
        ask = getattr(trainer, question, None)
        if ask is None:
            raise
        return ask(directory)
