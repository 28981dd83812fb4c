"""Write the trainer's tensors as weight versions on disk that hold only the changes.

`DeltaTransport` calls `write` once per push, and `prune` once the engines serve the version. A copy of the bytes last
written is kept in host memory. If a version cannot be written, the copy is restored too, so the next delta still starts
from the version that readers have.

    first push     weights equal to the checkpoint: a version that only names it; otherwise (a resume) a full version
    later pushes   deltas; a full version when the deltas since the last full version are larger than the model

Tensors of one weight version -> safetensors files of bounded size, called as Hugging Face calls shards.

`writer` fills one per version. The names say how many files there are, so they are given at the end, in a directory
that is not visible yet.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slime_core.errors import WeightSyncError
from slime_core.files import flush
from slime_core.models.hf_io import copy_assets
from slime_weight_transport_delta.format import (
    FULL,
    Version,
    changed_elements,
    checksum_function,
    claim,
    encode,
    version_directory,
    versions_in,
)
from slime_weight_transport_delta.raw_safetensors import (
    INDEX,
    Bytes,
    tensors_of,
    view,
    write_json,
    write_safetensors,
)

Weights = Iterable[tuple[str, torch.Tensor]]
_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32,
    "I64": torch.int64, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
_WORDS = {dtype: word for word, dtype in _DTYPES.items()}


@dataclass(frozen=True)
class Written:
    """The files that a push wrote to disk."""

    directory: Path
    density: float
    """Changed elements divided by all elements; 1 for a full version."""
    wire_bytes: int
    """Bytes of the version's safetensors files."""


@dataclass
class _Held:
    """The last written value of a tensor."""

    dtype: str
    shape: tuple[int, ...]
    data: Bytes


class DeltaWriter:
    """A writer of weight versions below a directory."""

    def __init__(
        self,
        root: Path,
        checkpoint: Path,
        *,
        run_dir: str,
        encoding: str = "xor",
        checksum: str = "xxh3-128",
        shard_bytes: int = 512 * 1024**2,
        keep_files: bool = False,
    ) -> None:
        """Claim the directory for this run, or refuse it.

        Args:
            root: Directory; versions go to `weight_v<version>` below it.
            checkpoint: `--hf-checkpoint`. Engines start from it, and versions have its dtypes.
            run_dir: Directory of this run; versions of other runs are never changed.
            encoding: xor or overwrite.
            checksum: xxh3-128, blake3 or adler32.
            shard_bytes: Size at which a file is closed.
            keep_files: Keep files that users may still want to inspect.

        Raises:
            ConfigError: The directory holds versions of another run, or a package for the checksum is missing.
        """
        self.root, self._checkpoint = root, checkpoint
        self._encoding, self._checksum_name, self._checksum = encoding, checksum, checksum_function(checksum)
        self._shard_bytes, self._keep_files = shard_bytes, keep_files
        self._held: dict[str, _Held] = {}
        self._whole = False
        """True if `_held` equals the version `_last`."""
        self._last = -1
        self._chain, self._chain_start, self._chain_bytes = "", 0, 0
        claim(root, run_dir)

    def write(self, weights: Weights, version: int) -> Written:
        """Write the weights to disk as `version`, atomically: readers see the whole version or none of it.

        Raises:
            WeightSyncError: The file system failed. Earlier versions are intact, and the next call can succeed.
        """
        partial = self.root / f".partial-{version_directory(self.root, version).name}"
        try:
            if not self._held:
                self._remove_stale(version)
            for left in self.root.glob(".partial-weight_v*"):
                shutil.rmtree(left, ignore_errors=True)
            partial.mkdir(parents=True)
            shards = Shards(partial, self._shard_bytes, self._checksum)
            if not self._held:
                return self._write_first(weights, version, shards)
            model_bytes = sum(held.data.nbytes for held in self._held.values())
            # A number is written again when its first version did not reach every engine; some may have it, so what
            # follows must not look like a delta upon it.
            if not self._whole or version <= self._last or self._chain_bytes > model_bytes:
                return self._write_full(self._capture(weights), version, shards)
            return self._write_delta(weights, version, shards)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise WeightSyncError(
                f"cannot write weight version {version} to {self.root}: {error}; earlier versions are intact"
            ) from error

    def prune(self) -> None:
        """Delete versions that no engine needs any more: everything before the last full version."""
        if self._keep_files:
            return
        for version, path in versions_in(self.root).items():
            if version < self._chain_start:
                shutil.rmtree(path, ignore_errors=True)

    # -- the three kinds of version ------------------------------------------------------------------

    def _write_first(self, weights: Weights, version: int, shards: Shards) -> Written:
        stored = {name: (path, entry) for name, path, entry in tensors_of(self._checkpoint)}
        same, held = True, {}
        for name, tensor in weights:
            path, entry = stored.get(name, (None, None))
            fits = path is not None and entry is not None and entry.shape == tuple(tensor.shape)
            held[name] = _hold(name, tensor, entry.dtype if fits and entry is not None else None)
            if not fits or path is None or entry is None or not np.array_equal(view(path, entry), held[name].data):
                same = False
        if not same:
            self._held = held
            return self._write_full(None, version, shards)
        sums = {name: self._checksum(view(path, entry)) for name, (path, entry) in stored.items()}
        index = Version(version, None, uuid.uuid4().hex, FULL, self._checksum_name, checksums=sums)
        index.base_checkpoint = str(self._checkpoint.resolve())
        target = self._publish(index, shards)
        self._held = held
        self._advance(index, 0)
        return Written(target, 0.0, 0)

    def _write_full(self, weights: Weights | None, version: int, shards: Shards) -> Written:
        """Write a full version in HF layout from the held tensors, after iterating `weights`."""
        self._whole = False
        for _ in weights or ():
            pass
        for name, held in self._held.items():
            shards.add(name, held.dtype, held.shape, held.data, self._checksum(held.data))
        index = Version(version, None, uuid.uuid4().hex, FULL, self._checksum_name)
        copy_assets(self._checkpoint, shards.directory)
        target = self._publish(index, shards)
        self._advance(index, 0)
        return Written(target, 1.0, index.nbytes)

    def _capture(self, weights: Weights) -> Weights:
        """Update the held tensors while iterating the weights."""
        given = set()
        for name, tensor in weights:
            held = self._known(name, tensor)
            np.copyto(held.data, _bytes(tensor, held.dtype))
            given.add(name)
            yield name, tensor
        self._check_complete(given)

    def _write_delta(self, weights: Weights, version: int, shards: Shards) -> Written:
        undo: list[tuple[_Held, Any, Any]] = []
        changed = total = 0
        given = set()
        try:
            for name, tensor in weights:
                held = self._known(name, tensor)
                given.add(name)
                new, item = _bytes(tensor, held.dtype), _DTYPES[held.dtype].itemsize
                positions = changed_elements(held.data, new, item)
                total += held.data.nbytes // item
                if not len(positions):
                    continue
                changed += len(positions)
                payload = np.frombuffer(encode(held.data, new, item, self._encoding, positions), np.uint8)
                if len(positions) * (8 + item) < held.data.nbytes:
                    undo.append((held, positions, _elements(held.data, item)[positions]))
                else:
                    undo.append((held, slice(None), _elements(held.data, item).copy()))
                np.copyto(held.data, new)
                shards.add(name, "U8", payload.shape, payload, self._checksum(held.data))
            self._check_complete(given)
            index = Version(version, self._last, self._chain, self._encoding, self._checksum_name)
            target = self._publish(index, shards)
        except BaseException:
            for held, where, old in undo:
                _elements(held.data, old.dtype.itemsize)[where] = old
            raise
        self._advance(index, self._chain_bytes + index.nbytes)
        return Written(target, changed / max(total, 1), index.nbytes)

    def _known(self, name: str, tensor: torch.Tensor) -> _Held:
        held = self._held.get(name)
        if held is None or held.shape != tuple(tensor.shape):
            raise WeightSyncError(f"tensor {name!r} of shape {tuple(tensor.shape)} was not in the version before")
        return held

    def _check_complete(self, given: set[str]) -> None:
        missing = sorted(self._held.keys() - given)
        if missing:
            raise WeightSyncError(f"tensors of the version before are missing: {', '.join(missing[:5])}")

    # -- files ---------------------------------------------------------------------------------------

    def _publish(self, index: Version, shards: Shards) -> Path:
        """Give the finished files their names; the rename of the directory is what makes the version exist."""
        index.weight_map, index.files = shards.finish()
        if index.base_checkpoint is not None:
            copy_assets(self._checkpoint, shards.directory)
        write_json(shards.directory / INDEX, index.to_json())
        target = version_directory(self.root, index.version)
        replaced = target.with_name(f".replaced-{target.name}")
        shutil.rmtree(replaced, ignore_errors=True)
        if target.exists():
            os.rename(target, replaced)
        os.rename(shards.directory, target)
        flush(self.root)
        shutil.rmtree(replaced, ignore_errors=True)
        return target

    def _advance(self, index: Version, chain_bytes: int) -> None:
        self._last, self._whole, self._chain_bytes = index.version, True, chain_bytes
        if index.base_version is None:
            self._chain, self._chain_start = index.chain, index.version

    def _remove_stale(self, first: int) -> None:
        """Remove versions of an earlier part of this run: with `keep_files` from `first` on, else all of them."""
        for replaced in self.root.glob(".replaced-weight_v*"):
            shutil.rmtree(replaced, ignore_errors=True)
        for version, path in versions_in(self.root).items():
            if version >= first or not self._keep_files:
                shutil.rmtree(path)


def _hold(name: str, tensor: torch.Tensor, dtype: str | None) -> _Held:
    """Return a copy of a tensor, in the checkpoint's dtype if the checkpoint has this tensor."""
    if dtype is None and tensor.dtype not in _WORDS:
        raise WeightSyncError(f"tensor {name!r}: no safetensors dtype for {tensor.dtype}")
    word = dtype or _WORDS[tensor.dtype]
    return _Held(word, tuple(tensor.shape), _bytes(tensor, word).copy())


def _bytes(tensor: torch.Tensor, dtype: str) -> Bytes:
    """Return row-major bytes in a dtype; they may share memory with the tensor."""
    flat = tensor.detach().to("cpu", _DTYPES[dtype]).contiguous().reshape(-1)
    data: Bytes = flat.view(torch.uint8).numpy()
    return data


def _elements(data: Bytes, item: int) -> Any:
    return data.view(f"u{item}")


def stored_dtypes(checkpoint: Path) -> Mapping[str, torch.dtype]:
    """Return the dtype of each tensor in an HF-layout directory. Raises WeightSyncError if torch lacks a dtype."""
    found = {}
    for name, path, entry in tensors_of(checkpoint):
        if entry.dtype not in _DTYPES:
            raise WeightSyncError(f"{path}: tensor {name!r} of dtype {entry.dtype} cannot be written as a delta")
        found[name] = _DTYPES[entry.dtype]
    return found


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
