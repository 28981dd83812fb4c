"""Read saved samples, and train on them (`--load-debug-rollout-data`; entry point `saved` of `slime.data`).

A file has JSON lines (`--save-debug-rollout-data`), or such lines packed by zstd (`--log-samples`), or what THUDM/slime
saves by `torch.save`. Its content says which, not its name: any of them may be called `.pt`.
"""

from __future__ import annotations

import io
import itertools
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from slime_core.data.dataset import exact_json
from slime_core.data.dumps import check_saved
from slime_core.errors import DataError
from slime_core.protocols import Args, RolloutTraits
from slime_core.sample import Group, RolloutFnTrainOutput, Sample

_LONGEST = 64 << 20
"""Limit in bytes on an unpacked line: guards against zstd bombs."""


class SavedRollout:
    """The rollout function of `--load-debug-rollout-data`: returns a file's samples without engine, data or reward."""

    traits = RolloutTraits(needs_engine=False, replays=True)  # a group may be in several files

    def __call__(self, args: Args, rollout_id: int, data_source: Any, evaluation: bool = False) -> RolloutFnTrainOutput:
        """Return the groups of the rollout's file. Raises DataError."""
        path = check_saved(args, rollout_id)
        trained = {"fate": "trained"}  # files of `--log-samples` also contain dropped samples
        samples = [s for s in read_samples(path) if getattr(s, "kept", trained)["fate"] == "trained"]
        groups = grouped(samples, args.n_samples_per_prompt)
        if args.load_debug_rollout_data_subsample is not None:
            groups = subsample(groups, args.load_debug_rollout_data_subsample)
        return RolloutFnTrainOutput(groups)


class UnusedSource:
    """The data source used with `SavedRollout`: keeps the cursor of a checkpoint unchanged, and has no samples."""

    def __init__(self, args: Args) -> None:
        self._state: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the loaded state."""
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep the state of the checkpoint's run."""
        self._state = state


def read_samples(path: Path) -> list[Sample]:
    """Read samples written by `write_samples` or by THUDM/slime's `--save-debug-rollout-data`.

    Raises:
        DataError: The file cannot be read; the message names the file and the line.
    """
    try:
        with path.open("rb") as file:
            start = file.peek()
            if start.startswith(b"PK"):
                rows = torch_rows(path)
            elif start.startswith(b"\x28\xb5\x2f\xfd"):
                rows = _json_rows(path, unpacked(path, file))
            else:
                rows = _json_rows(path, file)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    samples = []
    for number, row in enumerate(rows, start=1):
        try:
            samples.append(Sample.from_dict(row))
            samples[-1].validate()
        except (TypeError, ValueError) as error:
            raise DataError(f"{path}: sample {number}: {error}") from error
    if not samples:
        raise DataError(f"{path}: no samples in it")
    return samples


def _json_rows(path: Path, lines: Iterable[bytes]) -> list[Any]:
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(exact_json(line))
        except ValueError as error:
            raise DataError(f"{path}:{number}: no sample as JSON in {len(line)} bytes: {error}") from error
    return rows


def grouped(samples: Iterable[Sample], group_size: int) -> list[Group]:
    """Group neighbours by `group_index`; split samples without an index into runs of `group_size`."""
    groups: list[Group] = []
    for index, members in itertools.groupby(samples, key=lambda s: s.group_index):
        group = list(members)
        size = group_size if index is None else len(group)
        groups += [group[i : i + size] for i in range(0, len(group), size)]
    return groups


def subsample(groups: list[Group], ratio: float) -> list[Group]:
    """Return a fraction `ratio` of the groups, at least one group: half from the head, the rest from the tail."""
    count = max(1, int(len(groups) * ratio))
    head = count // 2
    return groups[:head] + groups[len(groups) - (count - head) :]


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
