"""Which layers of a model have routed experts, and how many: what the arrays of routing replay look like.

Called by the learner, which knows no trainer. The numbers come from the family plugin of either kind ("models" for the
embedded pair, "megatron_models" for the Megatron trainer), since most families have only one. What a reader would get
wrong: arrays have a row for every layer, dense ones included, as the engines report them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from slime_core.errors import PluginNotFoundError
from slime_core.models.config import load_model_config
from slime_core.models.megatron_family import Architecture, load_megatron_model


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


def routed_layers(directory: str | Path) -> RoutedLayers:
    """Of an HF-layout model with experts.

    Raises:
        ConfigError: `config.json` is not there or is another model's.
        PluginNotFoundError: No plugin knows the family.
    """
    try:
        config = load_model_config(directory)
    except PluginNotFoundError:
        architecture = load_megatron_model(directory).architecture
        chosen = int(architecture.transformer["moe_router_topk"])
        layers = layers_with_experts(architecture)
        return RoutedLayers(architecture.num_layers, layers, architecture.num_experts, chosen)
    assert config.moe is not None, "checked at start-up"
    return RoutedLayers(config.num_layers, config.moe.layers, config.moe.num_experts, config.moe.experts_per_token)


def layers_with_experts(architecture: Architecture) -> tuple[int, ...]:
    """Their numbers, as Megatron reads `moe_layer_freq`: a list of flags, or every n-th layer."""
    frequency, count = architecture.transformer.get("moe_layer_freq", 1), architecture.num_layers
    has = [i % frequency == 0 for i in range(count)] if isinstance(frequency, int) else list(frequency)
    return tuple(i for i in range(count) if has[i])
