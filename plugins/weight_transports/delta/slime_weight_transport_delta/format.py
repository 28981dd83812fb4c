"""Files with the changes between two versions of the weights: tensor encodings and the layout of a version.

    <root>/weight_v000007/
        model-00001-of-00002.safetensors   per changed tensor its zstd-compressed delta (U8); file metadata: tensor ->
                                           checksum of its NEW bytes
        model.safetensors.index.json       weight_map; metadata {version, base_version, delta_encoding,
                                           compression_format, checksum_format}; size and checksum of every file

A version without `base_version` needs no other version: a full version holds plain HF-layout weights, and a version
with `base_checkpoint` equals that checkpoint, tensor for tensor. Layout and encodings are those of THUDM/slime's disk
deltas; slime adds `chain`, `files`, `checksums` and `digest`. Version numbers repeat after a resume, so a delta fits a
local copy only if the `chain` is the same, too.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
import zstandard

from slime_core.errors import ConfigError, WeightSyncError
from slime_core.files import replace_file
from slime_weight_transport_delta.raw_safetensors import INDEX, Bytes

FORMAT = "slime-weights-1"
FULL = "none"
"""`delta_encoding` of versions without a base."""
OWNER = "slime_weights.json"
"""File that names the run that writes versions to the directory."""
_LEVEL = 1
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_NAME = re.compile(r"weight_v(\d{6,})")


# -- checksums -------------------------------------------------------------------------------------------


def checksum_function(name: str) -> Callable[[Bytes], str]:
    """Return the function bytes -> hex digits for a value of `--update-weight-delta-checksum`. Raises ConfigError."""
    if name == "xxh3-128":
        return lambda data: xxhash.xxh3_128_hexdigest(data.data)
    if name == "adler32":
        return lambda data: f"{zlib.adler32(data.data):08x}"
    if name == "blake3":
        try:
            from blake3 import blake3
        except ImportError as error:
            raise ConfigError(
                "--update-weight-delta-checksum blake3: the package is not installed; type pip install"
                " 'slime-rl[blake3]', or take xxh3-128"
            ) from error
        return lambda data: str(blake3(data.data).hexdigest())
    raise ConfigError(f"--update-weight-delta-checksum {name!r}; allowed: xxh3-128, blake3, adler32")


# -- one tensor ------------------------------------------------------------------------------------------


def changed_elements(old: Bytes, new: Bytes, item: int) -> Any:
    """Return the positions of elements (of `item` bytes) that differ, as [n] int64."""
    return np.flatnonzero(old.view(_UNSIGNED[item]) != new.view(_UNSIGNED[item]))


def encode(old: Bytes, new: Bytes, item: int, encoding: str, positions: Any) -> bytes:
    """Return the compressed delta of one tensor.

    Args:
        old: Bytes before the change.
        new: Bytes after the change, of the same length.
        item: Bytes per element.
        encoding: "xor": old ^ new. "overwrite": uint32 count, uint32 positions, values; little endian.
        positions: Result of `changed_elements`.

    Raises:
        WeightSyncError: With "overwrite", a position does not fit in 32 bits.
    """
    assert old.nbytes == new.nbytes, "callers compare shapes first"
    compress = zstandard.ZstdCompressor(level=_LEVEL).compress
    if encoding == "xor":
        return compress(np.bitwise_xor(old, new).data)
    if new.nbytes // item > 2**32:
        raise WeightSyncError(f"a tensor of {new.nbytes // item} elements; type --update-weight-delta-encoding xor")
    values = new.view(_UNSIGNED[item])[positions]
    return compress(np.uint32(len(positions)).tobytes() + positions.astype("<u4").tobytes() + values.tobytes())


def decode(payload: bytes, old: Bytes, item: int, encoding: str) -> Bytes:
    """Return the bytes after the change; inverse of `encode`. Raises ValueError if the payload is invalid."""
    largest = old.nbytes if encoding == "xor" else 4 + old.nbytes // item * (4 + item)
    try:
        said = zstandard.frame_content_size(payload)
        if not 0 <= said <= largest:
            raise ValueError(f"unpacks to {said} bytes; at most {largest} make sense")
        data = np.frombuffer(zstandard.ZstdDecompressor().decompress(payload), np.uint8)
    except zstandard.ZstdError as error:
        raise ValueError(f"not zstd: {error}") from error
    if encoding == "xor":
        if data.nbytes != old.nbytes:
            raise ValueError(f"{data.nbytes} bytes for a tensor of {old.nbytes}")
        return np.bitwise_xor(old, data)
    count = int(data[:4].view("<u4")[0]) if data.nbytes >= 4 else -1
    if data.nbytes != 4 + count * (4 + item):
        raise ValueError(f"{count} elements in {data.nbytes} bytes")
    positions = data[4 : 4 + 4 * count].view("<u4")
    if count and int(positions.max()) >= old.nbytes // item:
        raise ValueError(f"position {positions.max()} in a tensor of {old.nbytes // item} elements")
    new = old.copy()
    new.view(_UNSIGNED[item])[positions] = data[4 + 4 * count :].copy().view(_UNSIGNED[item])
    return new


# -- one version -----------------------------------------------------------------------------------------


@dataclass
class Version:
    """The `model.safetensors.index.json` of a version."""

    version: int
    base_version: int | None
    """The version to which the deltas apply; None for a version without a base."""
    chain: str
    """Identifier shared by a base and all its deltas."""
    encoding: str
    checksum: str
    """Name of the checksum algorithm."""
    base_checkpoint: str | None = None
    weight_map: dict[str, str] = field(default_factory=dict)
    files: dict[str, tuple[int, str]] = field(default_factory=dict)
    """File name -> (size, checksum)."""
    checksums: dict[str, str] = field(default_factory=dict)
    """Tensor -> checksum, for a version that equals a checkpoint."""
    directory: Path = field(default_factory=Path)

    @property
    def nbytes(self) -> int:
        """Return the total size of its safetensors files."""
        return sum(size for size, _ in self.files.values())

    def to_json(self) -> dict[str, Any]:
        """Return the content of the index."""
        metadata = {
            "version": self.version,
            "base_version": self.base_version,
            "delta_encoding": self.encoding,
            "compression_format": "none" if self.encoding == FULL else "zstd",
            "checksum_format": self.checksum,
            "total_size": self.nbytes,
            "format": FORMAT,
            "chain": self.chain,
        }
        if self.base_checkpoint is not None:
            metadata["base_checkpoint"] = self.base_checkpoint
        content = {
            "metadata": metadata,
            "weight_map": self.weight_map,
            "files": {name: list(facts) for name, facts in self.files.items()},
            "checksums": self.checksums,
        }
        return {**content, "digest": _digest(content)}

    def verify_files(self) -> None:
        """Raise WeightSyncError that names the first file with changed content."""
        checksum = checksum_function(self.checksum)
        for name, (size, expected) in self.files.items():
            path = self.directory / name
            try:
                found = path.stat().st_size
                digest = checksum(np.memmap(path, np.uint8, "r")) if found == size else ""
            except OSError as error:
                raise WeightSyncError(f"{path}: cannot be read ({error}); weight version {self.version}") from error
            if digest != expected:
                what = f"{found} bytes instead of {size}" if found != size else f"{self.checksum} differs"
                raise WeightSyncError(f"{path}: corrupted ({what}); weight version {self.version} was not applied")


def _digest(content: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())


def version_directory(root: Path, version: int) -> Path:
    """Return the directory of a version."""
    return root / f"weight_v{version:06d}"


def versions_in(root: Path) -> dict[int, Path]:
    """Return version -> directory for all version directories in `root`, in ascending order."""
    if not root.is_dir():
        return {}
    found = [(match, path) for path in root.iterdir() if (match := _NAME.fullmatch(path.name)) and path.is_dir()]
    return dict(sorted((int(match[1]), path) for match, path in found))


def claim(root: Path, run_dir: str) -> None:
    """Record the run that writes versions to `root`. Raises ConfigError if there are versions of another run."""
    run = str(Path(run_dir).resolve())
    path, owner = root / OWNER, None
    if path.is_file():
        try:
            owner = json.loads(path.read_text(encoding="utf-8")).get("run")
        except (OSError, ValueError, AttributeError) as error:
            raise ConfigError(f"{path}: cannot be read ({error}); choose another --update-weight-disk-dir") from error
    if owner == run:
        return
    # Below its own directory, a run finds nothing but what it wrote itself, in another mode perhaps.
    if versions_in(root) and not (owner is None and Path(run) in root.resolve().parents):
        raise ConfigError(
            f"--update-weight-disk-dir {root} holds weight versions of {owner or 'something else'}; choose another"
            " directory, or remove it"
        )
    try:
        root.mkdir(parents=True, exist_ok=True)
        replace_file(path, f"{json.dumps({'run': run})}\n".encode(), durable=True)
    except OSError as error:
        raise ConfigError(f"--update-weight-disk-dir {root}: cannot be written: {error}") from error


def read_version(root: Path, version: int) -> Version:
    """Read the index of a version. Raises WeightSyncError if it is missing or corrupted."""
    path = version_directory(root, version) / INDEX
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        digest = value.pop("digest")
        if digest != _digest(value):
            raise ValueError("its digest differs")
        metadata = value["metadata"]
        if metadata["format"] != FORMAT or metadata["version"] != version:
            raise ValueError(f"format {metadata['format']!r}, version {metadata['version']}")
        return Version(
            version,
            metadata["base_version"],
            metadata["chain"],
            metadata["delta_encoding"],
            metadata["checksum_format"],
            metadata.get("base_checkpoint"),
            value["weight_map"],
            {name: (int(size), str(checksum)) for name, (size, checksum) in value["files"].items()},
            value["checksums"],
            path.parent,
        )
    except FileNotFoundError as error:
        have = ", ".join(map(str, versions_in(root))) or "none"
        raise WeightSyncError(f"weight version {version} is not in {root} (there: {have})") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightSyncError(f"{path}: corrupted ({error}); weight version {version} was not applied") from error
