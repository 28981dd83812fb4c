"""Load a model in Hugging Face layout for training, and save the trained model for engines and checkpoints.

`EmbeddedTrainer` calls these functions. With adapters, the saved weights are merged so that any engine can serve them.
The adapters are saved too, and the run resumes from the adapters.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import cast

import torch

from slime_core.models.config import ModelConfig
from slime_core.models.hf_io import read_weights
from slime_embedded.hf.config import model_config
from slime_embedded.hf.files import in_files
from slime_embedded.hf.model import TransformersModel
from slime_embedded.models.decoder import Decoder
from slime_embedded.trainer import state
from slime_embedded.trainer.frozen import merged, tensors
from slime_embedded.trainer.settings import TrainerSettings


def published_weights(model: Decoder, settings: TrainerSettings) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names of the files and float32 tensors, adapters merged; a tied output layer is skipped, as in HF."""
    return in_files(merged(model, settings), model.places)


def left_out(model: Decoder, settings: TrainerSettings) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of `--hf-checkpoint` that the model does not hold."""
    if isinstance(model, TransformersModel):
        yield from model.left_out(settings.hf_checkpoint)


def save(directory: Path, model: Decoder, config: ModelConfig, settings: TrainerSettings) -> None:
    """Write the HF-layout model, and its adapters if any; `config` is the content of its config.json."""
    state.save_model(
        directory,
        dict(published_weights(model, settings)),
        config,
        settings.hf_checkpoint,
        settings.save_dtype,
        others=left_out(model, settings),
        exact=settings.lora is None,
        shard_bytes=settings.save_shard_bytes,
    )
    if settings.lora is not None:
        from slime_embedded.models.lora import FOLDER
        from slime_embedded.trainer.lora import save_adapter

        save_adapter(directory / FOLDER, model, settings.lora, settings.hf_checkpoint)


def load(directory: Path, model: Decoder, settings: TrainerSettings) -> None:
    """Load the files of `save`, bit for bit. Raises CheckpointError if they do not fit."""
    if settings.lora is not None:
        from slime_embedded.trainer.lora import load_adapter

        load_adapter(directory, model, settings.lora, settings.hf_checkpoint)
        return
    others = {name for name, _ in left_out(model, settings)}
    state.load_model(directory, dict(in_files(tensors(model).items(), model.places)), others.__contains__)


def load_model(directory: str, settings: TrainerSettings, device: torch.device) -> Decoder:
    """Load the model of a directory onto `device`; a teacher may have another architecture than the actor.

    Raises:
        ConfigError: The model cannot be read.
    """
    config = model_config(directory, settings.model_impl)
    if config.build is not None:
        built = config.build(config, directory, device)
        if settings.recompute and isinstance(built, TransformersModel):
            built.recompute_layers()
        return cast(Decoder, built)
    weights = read_weights(directory, device)
    return Decoder.from_weights(config, weights, device, recompute=settings.recompute, origin=directory)
