"""Tensors of an HF-layout directory by name, read one at a time, and their places in the parameters of a model.

transformers renames some tensors when it loads them, and stacks others, such as the matrices of experts, into one
parameter. `places` finds for every tensor of the files the strided part of the parameter that holds it, so that
saving, loading and weight updates read and write the live parameters under the names of the files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open

from slime_core.errors import ConfigError
from slime_core.models.hf_io import weight_files


class WeightFiles:
    """Names, shapes and tensors of a directory's safetensors files. Raises ConfigError if a file is missing."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._places: dict[str, Path] = {}
        for path in weight_files(directory):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 -- safe_open is no mapping
                    self._places[name], self.shapes[name] = path, tuple(file.get_slice(name).get_shape())

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor in its stored dtype; the file is closed again, so that its pages can leave memory."""
        with safe_open(self._places[name], framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(name)
        return tensor


class Place(NamedTuple):
    """A tensor of the files as a part of a parameter."""

    name: str
    """Name in the files."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    """First element, counted in the parameter."""

    def of(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the view of a contiguous parameter."""
        return parameter.as_strided(self.shape, self.strides, parameter.storage_offset() + self.offset)


Places = Mapping[str, Sequence[Place]]
"""Name of a parameter -> the tensors of the files that it holds."""


def places(loaded: Any, names: Iterable[str]) -> dict[str, list[Place]]:
    """Return the places in each parameter of a transformers model.

    Raises:
        ConfigError: A tensor of the files is no strided part of a parameter.
    """
    from transformers.core_model_loading import revert_weight_conversion

    found: dict[str, list[Place]] = {}
    for name in names:
        parameter = loaded.get_parameter(name).detach()
        written = revert_weight_conversion(loaded, {name: parameter})
        if len(written) == 1 and next(iter(written.values())) is parameter:
            found[name] = [Place(next(iter(written)), tuple(parameter.shape), parameter.stride(), 0)]
            continue
        # Numbers in place of weights show where each element of the files' tensors comes from.
        numbers = torch.arange(parameter.numel()).view(parameter.shape)
        written = revert_weight_conversion(loaded, {name: numbers})
        found[name] = [_place(name, inner, tensor) for inner, tensor in written.items()]
    return found


def _place(parameter: str, name: str, numbers: torch.Tensor) -> Place:
    first = numbers[(0,) * numbers.dim()]
    steps = [
        numbers.select(i, 1)[(0,) * (numbers.dim() - 1)] - first if n > 1 else 0 for i, n in enumerate(numbers.shape)
    ]
    place = Place(name, tuple(numbers.shape), tuple(map(int, steps)), int(first))
    whole = torch.arange(int(numbers.max()) + 1)
    if min(place.strides, default=0) < 0 or not torch.equal(place.of(whole), numbers):
        raise ConfigError(
            f"{name} of such models' files is not a part of the parameter {parameter}; it cannot be trained"
        )
    return place


def in_files(weights: Iterable[tuple[str, torch.Tensor]], where: Places | None) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of the files in parameters given by name; without places the names are the same."""
    for name, tensor in weights:
        if where is None or name not in where:
            yield name, tensor
        else:
            yield from ((place.name, place.of(tensor)) for place in where[name])
