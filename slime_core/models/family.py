"""Numbers of a model that the core needs: its shape, to balance samples over ranks, and its routed experts.

They come from the family's plugin of kind "models", or from the trainer if the family has no plugin. FLOPs count
multiplications and additions (2 per weight), causal attention at half the square, no normalisation or rotation.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from slime_core.errors import PluginNotFoundError
from slime_core.models.config import ModelConfig, load_model_config


@dataclass(frozen=True)
class RoutedLayers:
    """The mixture of experts of a model."""

    num_layers: int
    """Number of decoder layers, dense ones included."""
    layers: tuple[int, ...]
    """Indices of the layers with experts."""
    num_experts: int
    """Number of experts of each layer with experts."""
    experts_per_token: int


def decoder_shape(directory: str | Path, trainer: object) -> DecoderShape:
    """Return the shape of an HF-layout model, an estimate for balancing. Raises as `_config_or_answer`.

    Only the experts that a token passes through count, on average over the layers. Linear attention counts as full.
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


def routed_layers(directory: str | Path, trainer: object) -> RoutedLayers:
    """Return the experts of an HF-layout model, which set the shape of routing replay's arrays.

    The arrays have a row for every layer, dense ones included, as the engines report them.

    Raises as `_config_or_answer`.
    """
    config = _config_or_answer(directory, trainer, "routed_layers")
    if not isinstance(config, ModelConfig):
        layers: RoutedLayers = config
        return layers
    assert config.moe is not None, "checked at start-up"
    return RoutedLayers(config.num_layers, config.moe.layers, config.moe.num_experts, config.moe.experts_per_token)


def _config_or_answer(directory: str | Path, trainer: object, question: str) -> Any:
    """Return the model's `ModelConfig`, or the result of the trainer's method `question` if the family has no plugin.

    Raises:
        ConfigError: `config.json` is missing or describes another model.
        PluginNotFoundError: Neither a plugin nor the trainer knows the family.
    """
    try:
        return load_model_config(directory)
    except PluginNotFoundError:
        ask = getattr(trainer, question, None)
        if ask is None:
            raise
        return ask(directory)


@dataclass(frozen=True)
class DecoderShape:
    """The numbers of the architecture that FLOPs depend on."""

    hidden_size: int
    intermediate_size: int
    vocab_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    def forward_flops(self, length: int) -> int:
        """FLOPs of a forward pass over `length` tokens; a training step costs about three times that."""
        query = self.num_heads * self.head_dim
        key_value = self.num_kv_heads * self.head_dim
        projections = 2 * length * self.hidden_size * (query + 2 * key_value + query)
        attention = 2 * (2 * length * length * query) // 2
        mlp = 2 * length * 3 * self.hidden_size * self.intermediate_size
        return self.num_layers * (projections + attention + mlp) + 2 * length * self.hidden_size * self.vocab_size

    @property
    def activations(self) -> tuple[int, int]:
        """Elements that a token leaves in a layer for the backward pass: those of the norms, and those of matrices.

        The counting of Korthikanti et al. (2022) for grouped queries, a gated block and attention without scores.
        """
        query, key_value = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return 4 * self.hidden_size, 2 * query + 2 * key_value + 3 * self.intermediate_size
