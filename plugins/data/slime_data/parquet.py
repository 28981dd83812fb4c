"""Parquet file -> rows by index; a bounded cache holds decoded row groups.

`data.dataset.open_rows` finds it (entry-point group `slime.data`).
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict
from pathlib import Path
from typing import Any

from slime_core.data.dataset import Row, fingerprint_of, written
from slime_core.errors import DataError

_CACHE_BYTES = 256 << 20


class ParquetRows:
    """Rows of a parquet file; decoded row groups are kept up to 256 MiB, least recently used first out."""

    def __init__(self, path: Path, rows_slice: slice = slice(None)) -> None:
        self.path = path
        self._file = _open_parquet(path)
        meta = self._file.metadata
        self._group_ends: list[int] = []
        for group in range(meta.num_row_groups):
            self._group_ends.append((self._group_ends or [0])[-1] + meta.row_group(group).num_rows)
        self._range = range(meta.num_rows)[rows_slice]
        self._cache: OrderedDict[int, Any] = OrderedDict()
        self._lock = threading.Lock()
        self._opened = fingerprint_of(path, len(self))

    def __len__(self) -> int:
        return len(self._range)

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        row = self._range[index]
        group = bisect_right(self._group_ends, row)
        start = self._group_ends[group - 1] if group else 0
        with self._lock:
            table = self._table(group, index)
        values = table.slice(row - start, 1).to_pylist()[0]
        return {name: written(value) for name, value in values.items()}

    def _table(self, group: int, index: int) -> Any:
        """Return the decoded row group, from the cache or the file."""
        if group in self._cache:
            self._cache.move_to_end(group)
            return self._cache[group]
        try:
            table = self._file.read_row_group(group)
        except (OSError, ValueError) as error:  # pyarrow's errors derive from these two
            raise DataError(f"{self.where(index)}: cannot read row group {group}: {error}") from error
        self._cache[group] = table
        while len(self._cache) > 1 and sum(t.nbytes for t in self._cache.values()) > _CACHE_BYTES:
            self._cache.popitem(last=False)
        return table

    def where(self, index: int) -> str:
        """Return `file, row n`, with n from 1."""
        return f"{self.path}, row {self._range[index] + 1}"

    def fingerprint(self) -> dict[str, Any]:
        """Return the values that a resumed run compares, as they were when the file was opened."""
        return self._opened

    def close(self) -> None:
        """Close the file; safe to call twice."""
        self._file.close()


def _open_parquet(path: Path) -> Any:
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise DataError(f"{path}: reading parquet needs pyarrow; type: pip install 'slime-rl[parquet]'") from error
    try:
        return parquet.ParquetFile(path)
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: not a parquet file: {error}") from error
