"""A model in Hugging Face layout -> one to train, and the trained one as engines and checkpoints get it.

`EmbeddedTrainer` calls these. With adapters the weights that are written are merged, for whoever serves them, and the
run itself goes on from the adapters beside them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import cast

import torch

from slime_core.models.config import ModelConfig, load_model_config
from slime_core.models.hf_io import read_weights
from slime_embedded.models.decoder import Decoder
from slime_embedded.trainer import state
from slime_embedded.trainer.frozen import merged, tensors
from slime_embedded.trainer.settings import TrainerSettings


def published_weights(model: Decoder, settings: TrainerSettings) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and float32 tensors, adapters merged; a tied output layer is left out, as HF does."""
    names = model.published
    yield from ((names.get(name, name), tensor) for name, tensor in merged(model, settings))


def save(directory: Path, model: Decoder, config: ModelConfig, settings: TrainerSettings) -> None:
    """Write the HF-layout model, and the adapters where there are any; `config` is what its config.json says."""
    state.save_model(
        directory,
        dict(published_weights(model, settings)),
        config,
        settings.hf_checkpoint,
        settings.save_dtype,
        exact=settings.lora is None,
        shard_bytes=settings.save_shard_bytes,
    )
    if settings.lora is not None:
        from slime_embedded.trainer.lora import save_adapter

        save_adapter(directory, model, settings.lora, settings.hf_checkpoint)


def load(directory: Path, model: Decoder, settings: TrainerSettings) -> None:
    """Inverse of `save`, bit for bit. Raises CheckpointError when the files do not fit."""
    if settings.lora is not None:
        from slime_embedded.trainer.lora import load_adapter

        load_adapter(directory, model, settings.lora, settings.hf_checkpoint)
        return
    names = model.published
    state.load_model(directory, {names.get(name, name): tensor for name, tensor in tensors(model).items()})


def load_model(directory: str, settings: TrainerSettings, device: torch.device) -> Decoder:
    """The model of a directory, on `device`; a teacher may be of another architecture than the actor.

    Raises:
        ConfigError: It cannot be read.
    """
    config = load_model_config(directory)
    if config.build is not None:
        return cast(Decoder, config.build(config, directory, device))
    weights = read_weights(directory, device)
    return Decoder.from_weights(config, weights, device, recompute=settings.recompute, origin=directory)
