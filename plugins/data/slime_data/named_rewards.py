"""Resolve the rewards that rows of the data name, before anything starts.

So a typo in row 90,000 ends the command and not, an hour later, its sample. JSONL is searched as bytes and only rows
with a new name are parsed, which takes about a second per GB. Names that escape this search (spelled with backslashes,
past the first GiB, past row 10,000 of another format) fail their samples instead.
"""

from __future__ import annotations

import json
import mmap
import re
from collections.abc import Iterator, Mapping
from typing import Any

from slime_core.data.dataset import JsonlRows, Rows, open_rows
from slime_core.protocols import Args
from slime_core.rollout.reward import RewardStage

KEYS = ("custom_rm_path", "rm_type")
"""Keys of a row's metadata that name a reward."""
_SEARCHED_BYTES = 1 << 30
_SEARCHED_ROWS = 10_000
_PATTERNS = {key: re.compile(key.encode() + rb'\\*"\s*:\s*\\*"([^"\\]+)') for key in KEYS}


def check_named_rewards(rewards: RewardStage, args: Args, source: Any) -> None:
    """Resolve the rewards that rows of the training and the evaluation data name.

    Args:
        rewards: The stage, which keeps the resolved rewards.
        args: The run's settings.
        source: The data source; one without `rows` cannot be searched. None if the run only evaluates.

    Raises:
        ConfigError: A row names a reward that does not exist, or does not load; the message names the row.
        DataError: An evaluation file cannot be read.
    """
    rows: Rows | None = getattr(source, "rows", None)
    if rows is not None:
        _check(rewards, rows, args.metadata_key, {})
    for dataset in args.eval_datasets:
        rows = open_rows(dataset.path, origin=f"evaluation data set {dataset.name!r}:")
        try:
            _check(rewards, rows, dataset.metadata_key, dataset.metadata_overrides or {})
        finally:
            rows.close()


def _check(rewards: RewardStage, rows: Rows, metadata_key: str | None, overrides: Mapping[str, Any]) -> None:
    for key, spec, index in named_rewards(rows, metadata_key):
        if key not in overrides:
            rewards.require(spec, f"{rows.where(index)}: {key} in the row's {metadata_key!r}")


def named_rewards(rows: Rows, metadata_key: str | None) -> Iterator[tuple[str, str, int]]:
    """Yield (key, value, index of the first row found with it) for every distinct value."""
    if metadata_key is None:
        return
    seen: set[tuple[str, str]] = set()
    candidates = _jsonl_candidates(rows) if isinstance(rows, JsonlRows) else range(min(len(rows), _SEARCHED_ROWS))
    for index in candidates:
        metadata = _metadata(rows[index].get(metadata_key))
        for key in KEYS:
            value = metadata.get(key)
            if isinstance(value, str) and value and (key, value) not in seen:
                seen.add((key, value))
                yield key, value, index


def _jsonl_candidates(rows: JsonlRows) -> Iterator[int]:
    """Yield the rows in which a value first appears after one of the keys, in their metadata or not."""
    import numpy as np

    starts = rows.starts
    first, last = int(starts[0]), int(min(starts[-1], starts[0] + _SEARCHED_BYTES))
    with rows.path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for pattern in _PATTERNS.values():
            found: dict[bytes, int] = {}
            for match in pattern.finditer(data, first, last):
                found.setdefault(match[1], match.start())
            yield from (int(np.searchsorted(starts, offset, side="right")) - 1 for offset in found.values())


def _metadata(value: Any) -> Mapping[str, Any]:
    """Return the metadata of a row; the reader of rows reports values that are not objects."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return {}
    return value if isinstance(value, dict) else {}
