"""Update a local HF-layout copy of the model to a weight version on disk, with the deltas in between.

Pullers and `DeltaTransport.deliver` call `apply`. The module does not import torch, so that the puller process next to
an engine stays small. Deltas are written over the local copy in place. Before the first byte is written, the copy is
marked as torn in `.slime_weights.json`, so after a crash it is rebuilt from the last full version and never used.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from slime_core.errors import WeightSyncError
from slime_core.files import flush
from slime_weight_transport_delta.format import Version, checksum_function, decode, read_version
from slime_weight_transport_delta.raw_safetensors import (
    INDEX,
    Bytes,
    Entry,
    read_header,
    tensors_of,
    view,
    weight_files,
    write_json,
)

STATE = ".slime_weights.json"
_INCOMING = ".slime_incoming"
_LOCK = ".slime_lock"
_NOT_ASSETS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")


@dataclass(frozen=True)
class LocalState:
    """The version of the local copy."""

    version: int
    chain: str


@dataclass(frozen=True)
class Applied:
    """The result of `apply`."""

    version: int
    wire_bytes: int
    """Bytes read from the source: deltas, or full weights if the copy was rebuilt."""
    seconds: float
    rebuilt: bool
    """True if the copy was rebuilt from a full version, not updated by deltas."""


class _TornError(WeightSyncError):
    """Raised if the local copy does not match its recorded version."""


def apply(source_root: Path, local_dir: Path, to_version: int) -> Applied:
    """Update the local copy to a version.

    Args:
        source_root: Directory of versions (`--update-weight-disk-dir`).
        local_dir: Directory of the copy, created if missing. The engine loads it.
        to_version: Version to update to.

    Raises:
        WeightSyncError: A version is missing or corrupted (the message names it; the local copy is not changed), the
            file system failed, another process updates the copy, or the directory holds other files.
    """
    started = time.perf_counter()
    try:
        with _sole(local_dir):
            state = local_state(local_dir)
            plan = _plan(source_root, to_version, state)
            try:
                return _carry_out(plan, local_dir, started)
            except _TornError:
                # The data read was verified, so the local copy was corrupted before.
                plan = _plan(source_root, to_version, None)
                return _carry_out(plan, local_dir, started)
    except OSError as error:
        raise WeightSyncError(f"cannot bring {local_dir} to weight version {to_version}: {error}") from error


def local_state(local_dir: Path) -> LocalState | None:
    """Return version and chain of the copy; None if there is no copy, or it is torn."""
    try:
        value = json.loads((local_dir / STATE).read_text(encoding="utf-8"))
        return None if value["torn"] else LocalState(int(value["version"]), str(value["chain"]))
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        return None


def _plan(root: Path, to_version: int, state: LocalState | None) -> list[Version]:
    """Return the versions to apply, in order, starting after the local version or at a full version."""
    steps: list[Version] = []
    current = read_version(root, to_version)
    chain = current.chain
    while state is None or (current.version, current.chain) != (state.version, state.chain):
        steps.append(current)
        base = current.base_version
        if base is None:
            break
        if base >= current.version:
            raise WeightSyncError(f"{current.directory}: weight version {current.version} is based on {base}")
        if state is not None and state == LocalState(base, chain):
            break
        try:
            current = read_version(root, base)
        except WeightSyncError as error:
            have = "there is no local copy" if state is None else f"the local copy is version {state.version}"
            message = f"weight version {current.version} needs version {base}, but {have}: {error}"
            raise WeightSyncError(message) from error
        if current.chain != chain:
            raise WeightSyncError(
                f"weight version {steps[-1].version} needs version {base} of its own run; the one in {root} is another"
            )
    return steps[::-1]


def _carry_out(plan: list[Version], local_dir: Path, started: float) -> Applied:
    for version in plan:
        version.verify_files()
    bytes_read = sum(version.nbytes for version in plan)
    for version in plan:
        if version.base_version is None:
            bytes_read += _install(version, local_dir)
        else:
            _apply_delta(version, local_dir)
        write_json(local_dir / STATE, {"torn": False, "version": version.version, "chain": version.chain})
    if not plan:
        state = local_state(local_dir)
        assert state is not None
        return Applied(state.version, 0, time.perf_counter() - started, False)
    return Applied(
        plan[-1].version, bytes_read, time.perf_counter() - started, any(v.base_version is None for v in plan)
    )


# -- versions that stand by themselves ---------------------------------------------------------------


def _install(version: Version, local_dir: Path) -> int:
    """Replace the copy. Returns the bytes read besides the version's own files."""
    source = version.directory if version.base_checkpoint is None else Path(version.base_checkpoint)
    incoming = local_dir / _INCOMING
    shutil.rmtree(incoming, ignore_errors=True)
    incoming.mkdir()
    try:
        for path in _assets(version.directory):
            shutil.copyfile(path, incoming / path.name)
        files = weight_files(source)
        for path in [*files, *([source / INDEX] if (source / INDEX).is_file() else [])]:
            shutil.copyfile(path, incoming / path.name)
            flush(incoming / path.name)
        _verify(version, incoming)
        _mark_torn(local_dir)
        for old in [p for p in local_dir.iterdir() if p.is_file() and (p.suffix == ".safetensors" or p.name == INDEX)]:
            old.unlink()
        for path in incoming.iterdir():
            os.replace(path, local_dir / path.name)
        flush(local_dir)
    finally:
        shutil.rmtree(incoming, ignore_errors=True)
    return 0 if version.base_checkpoint is None else sum(path.stat().st_size for path in files)


def _assets(directory: Path) -> list[Path]:
    """Return config and tokenizer files: every file at the top level that holds no weights."""
    found = [p for p in directory.iterdir() if p.is_file() and p.suffix not in _NOT_ASSETS and p.name != INDEX]
    return [path for path in found if not path.name.startswith(".")]


def _verify(version: Version, incoming: Path) -> None:
    """Check that every tensor of the copy matches the version. Raises WeightSyncError."""
    checksum = checksum_function(version.checksum)
    sums = version.checksums if version.base_checkpoint is not None else _sums_of(version)
    found = {name: (path, entry) for name, path, entry in tensors_of(incoming)}
    for name in sorted(sums.keys() | found.keys()):
        if name not in found or name not in sums or checksum(view(*found[name])) != sums[name]:
            origin = version.base_checkpoint or version.directory
            raise WeightSyncError(
                f"{origin}: tensor {name!r} is not that of weight version {version.version}; nothing was changed"
            )


def _sums_of(version: Version) -> dict[str, str]:
    sums: dict[str, str] = {}
    for name in version.files:
        sums |= read_header(version.directory / name)[1]
    return {name: sums[name] for name in version.weight_map}


# -- deltas ------------------------------------------------------------------------------------------


def _apply_delta(version: Version, local_dir: Path) -> None:
    """Write the changed tensors over the copy. Raises _TornError when the result is not the version."""
    checksum = checksum_function(version.checksum)
    try:
        places = {name: (path, entry) for name, path, entry in tensors_of(local_dir)}
    except WeightSyncError as error:
        raise _TornError(str(error)) from error
    _mark_torn(local_dir)
    touched = set()
    for file in version.files:
        payloads, sums = read_header(version.directory / file)
        for name, payload in payloads.items():
            if name not in places:
                raise _TornError(f"{local_dir}: no tensor {name!r}, which weight version {version.version} changes")
            path, entry = places[name]
            try:
                data = view(version.directory / file, payload)
                new = decode(data.tobytes(), _read(path, entry), entry.item, version.encoding)
            except ValueError as error:
                raise _TornError(f"{version.directory / file}: tensor {name!r}: {error}") from error
            if checksum(new) != sums[name]:
                raise _TornError(
                    f"tensor {name!r}: after weight version {version.version} its {version.checksum} differs"
                )
            _write(path, entry, new)
            touched.add(path)
    for path in touched:
        flush(path)


def _read(path: Path, entry: Entry) -> Bytes:
    return np.fromfile(path, np.uint8, entry.nbytes, offset=entry.start)


def _write(path: Path, entry: Entry, data: Bytes) -> None:
    with path.open("r+b") as file:
        file.seek(entry.start)
        file.write(data.data)


# -- the local directory -----------------------------------------------------------------------------


def _mark_torn(local_dir: Path) -> None:
    write_json(local_dir / STATE, {"torn": True})


@contextmanager
def _sole(local_dir: Path) -> Iterator[None]:
    """Make the directory ours and hold it. Raises WeightSyncError when it is somebody else's."""
    local_dir.mkdir(parents=True, exist_ok=True)
    # A crash may leave the hidden files of a directory that has no state yet.
    if not (local_dir / STATE).exists() and any(not p.name.startswith(".") for p in local_dir.iterdir()):
        raise WeightSyncError(
            f"{local_dir} is not empty and no copy of slime's; choose another --update-weight-local-checkpoint-dir"
        )
    with (local_dir / _LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise WeightSyncError(f"{local_dir}: another process applies weights there") from error
        yield
