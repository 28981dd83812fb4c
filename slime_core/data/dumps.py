"""Samples on disk and back: `--save-debug-rollout-data` and `--load-debug-rollout-data`.

A file has one JSON object per line, readable by `Sample.from_dict`. Evaluations go to separate files, with `eval_`
before the number. The rollout stage writes the files. The entry point `saved` of `slime.data` reads them: its
`SavedRollout` replaces the rollout function when a run trains on samples that another run generated.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson

from slime_core.errors import DataError, RecordError, RolloutError, rollout_name
from slime_core.files import replace_file
from slime_core.protocols import Args
from slime_core.sample import Group, Sample
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
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, (line + b"\n" for line in lines))
    except OSError as error:
        raise RecordError(
            f"{path} cannot be written: {error}. Checkpoints are intact: make space there or name another place"
        ) from error


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


def to_json(value: object, what: str) -> bytes:
    """Return a value as JSON bytes. Raises RolloutError that names `what` if the value cannot be written."""
    try:
        return _written(value)
    except TypeError as error:
        with suppress(TypeError, ValueError):
            return _written(_spelled(value))
        raise RolloutError(f"{what} cannot be saved: {error}; keep JSON values in sample.metadata") from error


def _written(value: object) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY, default=json_default)


def _spelled(value: Any) -> object:
    """Return the value with integers beyond 64 bits, which orjson does not write, spelled as digits."""
    if isinstance(value, dict):
        return {key: _spelled(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_spelled(one) for one in value]
    return orjson.Fragment(str(value)) if type(value) is int and value.bit_length() > 63 else value
