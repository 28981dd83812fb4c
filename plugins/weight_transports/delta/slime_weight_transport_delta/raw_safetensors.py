"""Safetensors files as bytes, without torch, and files that survive a crash.

Writers and readers of weight deltas use this module: dtypes that numpy lacks (bfloat16, float8) are bytes here. Every
write goes through `os`, is flushed to the device and only then renamed to its final name, so that a reader on another
machine sees a complete file or none.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from slime_core.errors import WeightSyncError
from slime_core.files import replace_file

Bytes: TypeAlias = npt.NDArray[np.uint8]
"""[bytes of a tensor], row-major."""

ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}
"""Dtype in the format's spelling -> bytes of one element."""

INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_LARGEST_HEADER = 256 * 1024**2


@dataclass(frozen=True)
class Entry:
    """Position of a tensor in its file."""

    dtype: str
    """Dtype in the format's spelling: F32, BF16, ..."""
    shape: tuple[int, ...]
    start: int
    """Offset in bytes from the beginning of the file."""
    end: int

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return self.end - self.start

    @property
    def item(self) -> int:
        """Bytes per element."""
        return ITEM_BYTES[self.dtype]


def read_header(path: Path) -> tuple[dict[str, Entry], dict[str, str]]:
    """Return a file's tensors in the order of their bytes, and its metadata. Raises WeightSyncError with the file."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _LARGEST_HEADER):
                raise ValueError(f"{size} bytes do not hold a header of {length}")
            header = json.loads(file.read(length))
        metadata = header.pop("__metadata__", {})
        entries = {name: _entry(value, 8 + length) for name, value in header.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightSyncError(f"{path}: cannot be read as safetensors: {error}") from error
    for name, entry in entries.items():
        if not 8 + length <= entry.start <= entry.end <= size:
            raise WeightSyncError(f"{path}: tensor {name!r} lies outside the file")
    return dict(sorted(entries.items(), key=lambda item: item[1].start)), metadata


def _entry(value: Mapping[str, Any], origin: int) -> Entry:
    start, end = value["data_offsets"]
    shape = tuple(int(n) for n in value["shape"])
    entry = Entry(value["dtype"], shape, origin + int(start), origin + int(end))
    if entry.item * int(np.prod(shape, dtype=np.int64)) != entry.nbytes:
        raise ValueError(f"{shape} of {entry.dtype} in {entry.nbytes} bytes")
    return entry


def view(path: Path, entry: Entry) -> Bytes:
    """Return a tensor's bytes, mapped read-only from the file."""
    if entry.nbytes == 0:
        return np.empty(0, np.uint8)
    return np.memmap(path, np.uint8, "r", entry.start, (entry.nbytes,))


def weight_files(directory: Path) -> list[Path]:
    """Return the safetensors files of an HF-layout directory. Raises WeightSyncError if it has no files."""
    names: Iterable[str] = (_SINGLE,)
    if (directory / INDEX).is_file():
        try:
            names = json.loads((directory / INDEX).read_text(encoding="utf-8"))["weight_map"].values()
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise WeightSyncError(f"{directory / INDEX}: no index with a weight_map ({error})") from error
    files = [directory / name for name in dict.fromkeys(names)]
    missing = [file.name for file in files if not file.is_file()]
    if missing or not files:
        raise WeightSyncError(f"{directory}: no weights ({', '.join(missing) or 'empty index'})")
    return files


def tensors_of(directory: Path) -> Iterator[tuple[str, Path, Entry]]:
    """Yield every tensor of an HF-layout directory with its file and position. Raises WeightSyncError."""
    for file in weight_files(directory):
        for name, entry in read_header(file)[0].items():
            yield name, file, entry


def write_safetensors(
    path: Path, tensors: Sequence[tuple[str, str, Sequence[int], Bytes]], metadata: Mapping[str, str]
) -> int:
    """Write (name, dtype, shape, bytes) to a file, flushed to the device; returns its size. Raises OSError."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, dtype, shape, data in tensors:
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + data.nbytes]}
        offset += data.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    chunks: list[bytes | memoryview] = [len(text).to_bytes(8, "little"), text]
    chunks += [data.data for _, _, _, data in tensors]
    return write_file(path, chunks)


# -- files -----------------------------------------------------------------------------------------------


def write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> int:
    """Write and flush to the device; returns the number of bytes. Raises OSError."""
    with path.open("wb") as file:
        file.writelines(chunks)
        file.flush()
        os.fsync(file.fileno())
        return file.tell()


def write_json(path: Path, value: Any) -> None:
    """Replace the file, complete or not at all, also over a power cut. Raises OSError."""
    replace_file(path, f"{json.dumps(value, indent=1)}\n".encode(), durable=True)
