"""The numbers by which samples are balanced over ranks.

Of the family's plugin of kind "models"; of a family that has none, as the trainer tells. These are estimates for
balancing. Experts count as those that a token goes through, on average over the layers; linear attention as if it were
full.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slime_core.errors import PluginNotFoundError
from slime_core.models.config import load_model_config
from slime_core.ops.flops import DecoderShape


def decoder_shape(directory: str | Path, trainer: Any) -> DecoderShape:
    """Of an HF-layout model.

    Args:
        directory: With the model's `config.json`.
        trainer: Asked by `decoder_shape(directory)`, where it has that.

    Raises:
        ConfigError: `config.json` is not there or is another model's.
        PluginNotFoundError: Nobody knows the family.
    """
    try:
        config = load_model_config(directory)
    except PluginNotFoundError:
        ask = getattr(trainer, "decoder_shape", None)
        if ask is None:
            raise
        shape: DecoderShape = ask(directory)
        return shape
    inner, moe = config.intermediate_size, config.moe
    if moe is not None:
        inner += len(moe.layers) * (moe.experts_per_token * moe.intermediate_size - inner) // config.num_layers
    return DecoderShape(
        hidden_size=config.hidden_size,
        intermediate_size=inner,
        vocab_size=config.vocab_size,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
    )
