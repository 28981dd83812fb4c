"""A model without weights, and each process's shards of the weights, read from the files a tensor at a time.

`FsdpTrainer` builds a model whose parameters take no memory, shards it, and fills the shards. A process never holds
more than its share and one whole parameter. All processes read the files, each for itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from slime_embedded.hf.config import model_config
from slime_embedded.hf.files import Place, WeightFiles
from slime_embedded.hf.model import TransformersModel, freeze_buffers, load_transformers
from slime_embedded.models.decoder import Decoder
from slime_embedded.models.stored import check_shapes
from slime_embedded.trainer.settings import TrainerSettings

logger = logging.getLogger(__name__)
_UNUSED = ("lm_head.weight", "rotary_emb.inv_freq")
"""Tensors that files may have and a model lacks: a tied output layer, and numbers that follow from others."""


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Create the parameters of modules without memory; buffers are computed as always."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def empty_model(directory: str, settings: TrainerSettings) -> Decoder:
    """Return the model of a directory with parameters on the meta device. Raises ConfigError if it cannot be built."""
    config = model_config(directory, settings.model_impl)
    with parameters_on_meta():
        if config.build is None:
            return Decoder(config, recompute=settings.recompute)
        model = TransformersModel.without_weights(config, directory)
    if settings.recompute:
        model.recompute_layers()
    return model


def fill(model: Decoder, directory: str, device: torch.device, made: Mapping[str, torch.Tensor]) -> None:
    """Give a sharded model memory on `device`, and copy this process's part of every parameter.

    Args:
        model: A model of `empty_model`, sharded.
        directory: HF-layout directory with its weights.
        device: Device of the shards.
        made: Whole first values of the parameters that are not in the files, by name.

    Raises:
        CheckpointError: A tensor is missing, unknown or of another shape.
    """
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to_empty(device=device)
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    read = _reader(model, WeightFiles(directory), made.keys())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor)
            whole = (made[name] if name in made else read(name)).to(device, torch.float32)
            own = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.to_local().copy_(own.to_local())


def _reader(model: Decoder, files: WeightFiles, made: Collection[str]) -> Callable[[str], torch.Tensor]:
    """Return the function that reads a whole parameter by name. Raises CheckpointError."""
    wanted = {
        name: model.places[name] if model.places else [Place(name, tuple(parameter.shape), parameter.stride(), 0)]
        for name, parameter in model.named_parameters()
        if name not in made
    }
    expected = {place.name: place.shape for found in wanted.values() for place in found}
    ignored = {name for name in files.shapes.keys() - expected.keys() if name.endswith(_UNUSED) or name in made}
    if isinstance(model, TransformersModel):
        ignored |= model.ignored(files.shapes)
        if expected.keys() != files.shapes.keys() - ignored:
            logger.warning(
                "%s: its tensors have not the names that transformers gives them, so each process loads the whole model"
                " before it keeps its shards",
                files.directory,
            )
            loaded = load_transformers("AutoModelForCausalLM", str(files.directory), "cpu")
            freeze_buffers(loaded)
            model.take_places(loaded)
            return lambda name: loaded.get_parameter(name).detach()
    found = {name: shape for name, shape in files.shapes.items() if name not in ignored}
    check_shapes(expected, found, str(files.directory))

    def read(name: str) -> torch.Tensor:
        first, *more = wanted[name]
        parameter = model.get_parameter(name)
        if not more and first.shape == tuple(parameter.shape) and first.strides == parameter.stride():
            return files.read(first.name)
        whole = torch.empty(parameter.shape)
        for place in wanted[name]:
            place.of(whole).copy_(files.read(place.name))
        return whole

    return read
