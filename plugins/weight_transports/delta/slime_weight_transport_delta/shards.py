"""Tensors of one weight version -> safetensors files of bounded size, called as Hugging Face calls shards.

`writer` fills one per version. The names say how many files there are, so they are given at the end, in a directory
that is not visible yet.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from slime_weight_transport_delta.raw_safetensors import Bytes, write_safetensors


class Shards:
    """Tensors in the order they come, in files of bounded size whose number is known at the end."""

    def __init__(self, directory: Path, bound: int, checksum: Callable[[Bytes], str]) -> None:
        self.directory = directory
        self._bound, self._checksum = bound, checksum
        self._tensors: list[tuple[str, str, tuple[int, ...], Bytes]] = []
        self._sums: dict[str, str] = {}
        self._written: list[list[str]] = []

    def add(self, name: str, dtype: str, shape: tuple[int, ...], data: Bytes, checksum: str) -> None:
        """Take a tensor or a delta; `checksum` goes into the file's metadata. Raises OSError."""
        if self._tensors and sum(t[3].nbytes for t in self._tensors) + data.nbytes > self._bound:
            self._close()
        self._tensors.append((name, dtype, shape, data))
        self._sums[name] = checksum

    def _close(self) -> None:
        path = self.directory / f"{len(self._written)}.part"
        write_safetensors(path, self._tensors, {"format": "pt", **self._sums})
        self._written.append([name for name, *_ in self._tensors])
        self._tensors, self._sums = [], {}

    def finish(self) -> tuple[dict[str, str], dict[str, tuple[int, str]]]:
        """Tensor -> file, and file -> size and checksum. Raises OSError."""
        if self._tensors:
            self._close()
        weight_map: dict[str, str] = {}
        files: dict[str, tuple[int, str]] = {}
        for number, names in enumerate(self._written):
            name = f"model-{number + 1:05d}-of-{len(self._written):05d}.safetensors"
            path = self.directory / name
            os.rename(self.directory / f"{number}.part", path)
            files[name] = (path.stat().st_size, self._checksum(np.memmap(path, np.uint8, "r")))
            weight_map |= dict.fromkeys(names, name)
        return weight_map, files
