"""Read saved samples in other formats than JSON lines: packed by zstd (`--log-samples`), and by THUDM/slime.

`data.dumps.read_samples` calls this (entry-point group `slime.data`).
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from slime_core.errors import DataError

_LONGEST = 64 << 20
"""Limit in bytes on an unpacked line: guards against zstd bombs."""


def unpacked(path: Path, file: BinaryIO) -> Iterator[bytes]:
    """Yield lines of samples that a run kept (`--log-samples`), cut at `_LONGEST` bytes. Raises DataError."""
    import zstandard

    reader = io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True))
    size = os.fstat(file.fileno()).st_size
    most, most_rows = most_unpacked(size)
    try:
        for number, line in enumerate(iter(lambda: reader.readline(_LONGEST), b"")):
            most -= len(line)
            if most < 0 or number >= most_rows:
                raise DataError(f"{path}: its {size:,} bytes unpack to more samples than so few bytes can hold")
            yield line
    except zstandard.ZstdError as error:
        raise DataError(f"{path}: damaged: {error}") from error


def most_unpacked(size: int) -> tuple[int, int]:
    """Return how many bytes and rows a packed file of `size` bytes may hold; samples unpack to about 10 times of it."""
    return (64 << 20) + 64 * size, 512 + size // 2


def torch_rows(path: Path) -> list[Any]:
    """Read the rows of THUDM/slime's `{"rollout_id", "samples": [dict]}`; unpickle only tensors and plain values."""
    import pickle

    import torch

    try:
        stored = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        reason = str(error).strip().splitlines()[0]
        raise DataError(
            f"{path}: not a rollout of THUDM/slime that can be read safely (plain values and tensors): {reason}"
        ) from error
    if not isinstance(stored, dict) or not isinstance(stored.get("samples"), list):
        raise DataError(f"{path}: expected {{'rollout_id', 'samples': [...]}}; found {type(stored).__name__}")
    return list(stored["samples"])
