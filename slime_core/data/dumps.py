"""Samples on disk and back: `--save-debug-rollout-data` and `--load-debug-rollout-data`.

A file has one JSON object per line, readable by `Sample.from_dict`. Evaluations go to separate files, with `eval_`
before the number. The rollout stage writes the files. `SavedRollout` replaces the rollout function when a run trains
on samples that another run generated. The format is recognized by a file's content, not by its name, so THUDM/slime's
`torch.save` files and the JSON files can both be called `.pt`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson

from slime_core.data.dataset import exact_json
from slime_core.distributions import provided
from slime_core.errors import DataError, RecordError, RolloutError, rollout_name
from slime_core.protocols import Args, RolloutTraits
from slime_core.sample import Group, RolloutFnTrainOutput, Sample
from slime_core.sample.routed_experts import json_default

_VERSION = "rollout_weight_version"


class _EvalId(int):
    """A rollout id that formats with the prefix `eval_`, whatever the format."""

    def __format__(self, spec: str) -> str:
        return "eval_" + format(int(self), spec)


def dump_path(template: str, rollout_id: int, *, evaluation: bool = False) -> Path:
    """Return the template with `{rollout_id}` filled in."""
    return Path(template.format(rollout_id=_EvalId(rollout_id) if evaluation else rollout_id))


def write_samples(path: Path, samples: Iterable[Sample], weight_version: int | None = None) -> None:
    """Write samples to a file atomically, one JSON object per line.

    Args:
        path: The file.
        samples: Samples in the order in which they are trained on.
        weight_version: The newest version when the rollout ended, stored with each sample, so that training on the file
            computes the original staleness of the tokens.
    """
    extra = {} if weight_version is None else {_VERSION: weight_version}
    write_lines(path, (to_json({**s.to_dict(), **extra}, f"sample {s.index}") for s in samples))


def newest_version(groups: Iterable[Group], default: int) -> int:
    """Return the newest weight version when the samples were saved.

    For files of other tools, which do not record it, return the version of the newest token, or `default`.
    """
    samples = [s for group in groups for s in group]
    noted: list[int] = [v for s in samples if (v := getattr(s, _VERSION, None)) is not None]
    return max(noted or [v for s in samples for v in s.token_weight_versions] or [default])


def write_lines(path: Path, lines: Iterable[bytes]) -> None:
    """Write lines to a file atomically; create its directory if missing. Raises RecordError."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            file.writelines(line + b"\n" for line in lines)
        partial.replace(path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise RecordError(
            f"{path} cannot be written: {error}. Checkpoints are intact: make space there or name another place"
        ) from error


def read_samples(path: Path) -> list[Sample]:
    """Read samples written by `write_samples` or by THUDM/slime's `--save-debug-rollout-data`.

    Raises:
        DataError: The file cannot be read; the message names the file and the line.
    """
    try:
        with path.open("rb") as file:
            start = file.peek()
            if start.startswith(b"PK"):
                rows = provided("slime.data", "saved").torch_rows(path)
            elif start.startswith(b"\x28\xb5\x2f\xfd"):
                rows = _json_rows(path, provided("slime.data", "saved").unpacked(path, file))
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


def check_saved(args: Args, rollout_id: int) -> Path:
    """Return the file of this rollout. Raises DataError if it is missing."""
    assert args.load_debug_rollout_data is not None, "nothing else chooses these rollouts"
    path = dump_path(args.load_debug_rollout_data, rollout_id)
    if not path.is_file():
        raise DataError(
            f"--load-debug-rollout-data {args.load_debug_rollout_data}: no file {path} for {rollout_name(rollout_id)};"
            " --save-debug-rollout-data makes them, --start-rollout-id and --num-rollout say which are read"
        )
    return path


def to_json(value: Any, what: str) -> bytes:
    """Return a value as JSON bytes. Raises RolloutError that names `what` if the value cannot be written."""
    try:
        return _written(value)
    except TypeError as error:
        with suppress(TypeError, ValueError):
            return _written(_spelled(value))
        raise RolloutError(f"{what} cannot be saved: {error}; keep JSON values in sample.metadata") from error


def _written(value: Any) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY, default=json_default)


def _spelled(value: Any) -> Any:
    """Return the value with integers beyond 64 bits, which orjson does not write, spelled as digits."""
    if isinstance(value, dict):
        return {key: _spelled(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_spelled(one) for one in value]
    return orjson.Fragment(str(value)) if type(value) is int and value.bit_length() > 63 else value
