"""The tensors of an HF-layout directory by name, read one at a time: a model need not fit into memory."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open

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
