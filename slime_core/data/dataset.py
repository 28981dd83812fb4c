"""JSONL or parquet file -> rows by index, without holding the file in memory.

`prompts.py` and the evaluation read through this. A JSONL file costs 8 bytes per row (the offset of each line), a
parquet file the row groups of a bounded cache. Row `i` is not line `i + 1`, since blank lines do not count and
`path@[a:b]` shifts; `where(i)` names the place in the file.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
import weakref
from array import array
from collections import OrderedDict
from collections.abc import Mapping
from datetime import date, time
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol, TypeAlias

from slime_core.errors import DataError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Offsets: TypeAlias = NDArray[np.int64]

Row: TypeAlias = dict[str, Any]

_SLICE = re.compile(r"^(?P<path>.*)@\[(?P<start>-?\d*):(?P<stop>-?\d*)\]$")
_LONG_INTEGER = re.compile(rb"[:\[,\s-]\d{19}|^\d{19}")
_READ_BYTES = 8 << 20
_CACHE_BYTES = 256 << 20
_HEAD_BYTES = 1 << 16


class Rows(Protocol):
    """The rows of one file, after slicing. Reading a bad row raises DataError with the row's place."""

    path: Path

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Row: ...

    def where(self, index: int) -> str:
        """Return `file:line` or `file, row n`, for messages."""

    def fingerprint(self) -> dict[str, Any]:
        """Return the size, the number of rows and a hash of the first and last 64 KiB, which a resumed run compares."""

    def close(self) -> None:
        """Close the file; safe to call twice."""


def split_path(spec: str) -> tuple[Path, slice]:
    """Split `path@[a:b]` into path and slice; a bare path means all rows. Raises DataError for a bound like `-`."""
    match = _SLICE.match(spec)
    if match is None:
        return Path(spec), slice(None)
    bounds = []
    for text in (match["start"], match["stop"]):
        if text == "-":
            raise DataError(f"{spec}: '-' is no row number; write for example {match['path']}@[-100:]")
        bounds.append(int(text) if text else None)
    return Path(match["path"]), slice(bounds[0], bounds[1])


def open_rows(spec: str | Path, origin: str = "--prompt-data", *, stream: bool = False) -> Rows:
    """Open `path.jsonl`, `path.parquet` or a slice `path@[a:b]` of one, and check its first and last row.

    Args:
        spec: One file; several files are joined beforehand (`cat a.jsonl b.jsonl`).
        origin: The setting that named the file, for messages.
        stream: Look through a JSONL file only as far as rows are asked for; its last row is not checked.

    Raises:
        DataError: No such file, no rows, a format that is not read, or a malformed first or last row.
    """
    path, rows_slice = split_path(str(spec))
    readers: dict[str, type[JsonlRows | ParquetRows]] = {
        ".jsonl": JsonlRows,
        ".ndjson": JsonlRows,
        ".parquet": ParquetRows,
    }
    reader = readers.get(path.suffix.lower())
    try:
        if path.is_dir():
            raise DataError(f"{origin} {spec}: a directory; name one .jsonl or .parquet file in it")
        if not path.is_file():
            broken = f"a link to {os.readlink(path)}, which is not there" if path.is_symlink() else "no such file"
            found = "a pipe or a device; write the rows to a file" if path.exists() else broken
            raise DataError(f"{origin} {spec}: {found}")
        if reader is None:
            raise DataError(
                f"{origin} {spec}: cannot read {path.suffix or 'a file without suffix'}; use .jsonl or .parquet"
            )
        if stream and reader is JsonlRows:
            if rows_slice != slice(None):
                raise DataError(f"{origin} {spec}: --streaming-data reads whole files; leave one of the two out")
            reader = StreamedRows
        rows = reader(path, rows_slice)
        if not has_row(rows, 0):
            raise DataError(f"{origin} {spec}: no rows")
        for index in {0} if isinstance(rows, StreamedRows) else {0, len(rows) - 1}:
            rows[index]
    except OSError as error:
        raise DataError(f"{origin} {spec}: cannot be read: {error.strerror}") from error
    return rows


def has_row(rows: Rows, index: int) -> bool:
    """Return whether row `index` exists; a streamed file is read only up to that row."""
    return rows.reaches(index) if isinstance(rows, StreamedRows) else index < len(rows)


def exact_json(text: str | bytes) -> Any:
    """Parse JSON, integers of more than 64 bits included.

    Raises:
        ValueError: The text is not JSON (JSONDecodeError), or an integer has more digits than Python reads.
    """
    import orjson

    long = _LONG_INTEGER.search(text if isinstance(text, bytes) else text.encode())
    return json.loads(text) if long else orjson.loads(text)  # orjson makes floats of such integers


def column(row: Mapping[str, Any], name: str, flag: str = "") -> Any:
    """Return the value of a column; `a.b` is the value of key `b` in the objects of column `a`.

    Raises:
        DataError: The row has no such column; `flag` is the setting that names the column.
    """
    outer, _, inner = name.partition(".")
    if name not in row and isinstance(row.get(outer), Mapping) and inner:
        return column(row[outer], inner, flag)
    if name not in row:
        named = f" ({flag})" if flag else ", which the first row has"
        raise DataError(f"no column {name!r}{named}; the row has: {', '.join(row) or 'none'}")
    return row[name]


def written(value: Any) -> Any:
    """Return the value without null keys, at every depth: Arrow gives objects the union of all rows' keys.

    A message keeps its `content`, which is null next to tool calls. Arrow's maps become objects; its decimals and dates
    become text.
    """
    if isinstance(value, Mapping):
        kept = {k: v for k, v in value.items() if v is not None or (k == "content" and "role" in value)}
        return {k: written(v) for k, v in kept.items()}
    if isinstance(value, list):
        of_map = value and all(isinstance(pair, tuple) for pair in value)
        return written(dict(value)) if of_map else [written(inner) for inner in value]
    if isinstance(value, Decimal):
        return format(value, "f")
    return value.isoformat() if isinstance(value, date | time) else value


class JsonlRows:
    """A file with a JSON object per line, read on demand with `pread`: threads and forked processes may share it."""

    def __init__(self, path: Path, rows_slice: slice = slice(None)) -> None:
        self.path = path
        starts = _line_starts(path)
        start, stop, _ = rows_slice.indices(len(starts) - 1)
        self._starts = starts[start : max(start, stop) + 1].copy()
        self._file = os.open(path, os.O_RDONLY)
        self._changed = os.fstat(self._file).st_mtime_ns
        self._opened = _fingerprint(path, len(self))
        self._close = weakref.finalize(self, _close, self._file, None)

    @property
    def starts(self) -> Offsets:
        """[rows + 1] byte offsets of the rows, and of the end."""
        return self._starts

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, index: int) -> Row:
        start, stop = self._span(index)
        line = os.pread(self._file, stop - start, start).strip()
        try:
            row = exact_json(line)
        except json.JSONDecodeError as error:
            cut = " (the line is cut off)" if line.startswith(b"{") and not line.endswith(b"}") else ""
            if os.fstat(self._file).st_mtime_ns != self._changed:
                cut = " (the file has been changed since the run opened it)"
            raise DataError(f"{self.where(index)}: not JSON: {error.msg} at column {error.colno}{cut}") from error
        except ValueError as error:
            raise DataError(f"{self.where(index)}: {error}") from error
        if not isinstance(row, dict):
            raise DataError(f"{self.where(index)}: a JSON {type(row).__name__}; each line must be an object {{...}}")
        return row

    def _span(self, index: int) -> tuple[int, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        return int(self._starts[index]), int(self._starts[index + 1])

    def where(self, index: int) -> str:
        """Return `file:line`; counts newlines up to the row, a cost that only messages have."""
        start, at, line = self._span(index)[0], 0, 1
        while chunk := os.pread(self._file, min(start - at, _READ_BYTES), at):
            line += chunk.count(b"\n")
            at += len(chunk)
        return f"{self.path}:{line}"

    def fingerprint(self) -> dict[str, Any]:
        """Return the values that a resumed run compares, as they were when the file was opened."""
        return self._opened

    def close(self) -> None:
        """Close the file; safe to call twice."""
        self._close()


class StreamedRows(JsonlRows):
    """A JSONL file whose lines are located as rows are read; `len` scans the rest of the file."""

    def __init__(self, path: Path, rows_slice: slice = slice(None)) -> None:
        assert rows_slice == slice(None)
        self.path = path
        self._found = array("q")
        """Byte offset of each row found so far, and of the end of the file once it has been reached."""
        self._complete = False
        self._lock = threading.Lock()
        self._scan = open(path, "rb")  # noqa: SIM115  # closed by `close`
        self._file = os.open(path, os.O_RDONLY)
        self._changed = os.fstat(self._file).st_mtime_ns
        self._opened = _fingerprint(path, None)
        self._close = weakref.finalize(self, _close, self._file, self._scan)

    @property
    def starts(self) -> Offsets:
        """[rows + 1] byte offsets of the rows, and of the end."""
        import numpy as np

        self._find(None)
        return np.array(self._found, dtype=np.int64)

    def reaches(self, index: int) -> bool:
        """Return whether row `index` exists."""
        self._find(index)
        return index < len(self._found) - 1

    def _find(self, index: int | None) -> None:
        """Scan lines until the end of row `index` is known; None scans to the end of the file."""
        with self._lock:
            while not self._complete and (index is None or len(self._found) < index + 2):
                at = self._scan.tell()
                line = self._scan.readline()
                self._complete = not line
                if not line or line.strip():
                    self._found.append(at)

    def __len__(self) -> int:
        self._find(None)
        return len(self._found) - 1

    def _span(self, index: int) -> tuple[int, int]:
        if index < 0 or not self.reaches(index):
            raise IndexError(f"row {index} of {len(self)}")
        return self._found[index], self._found[index + 1]


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
        self._opened = _fingerprint(path, len(self))

    def __len__(self) -> int:
        return len(self._range)

    def __getitem__(self, index: int) -> Row:
        from bisect import bisect_right

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


def _line_starts(path: Path) -> Offsets:
    """Return the [n + 1] byte offsets of each non-blank line and of the end of the file; one pass in 8 MiB reads."""
    import numpy as np

    parts: list[Offsets] = []
    base = 0
    with open(path, "rb") as file:
        while chunk := file.read(_READ_BYTES):
            chunk += file.readline()  # whole lines only, so that no line spans two chunks
            data = np.frombuffer(chunk, dtype=np.uint8)
            ends = np.flatnonzero(data == ord("\n"))
            starts = np.concatenate([[0], ends[:-1] + 1]) if chunk.endswith(b"\n") else np.concatenate([[0], ends + 1])
            # A row begins with "{"; only lines that do not are looked at, which keeps the pass vectorised.
            for i in np.flatnonzero(data[starts] != ord("{")):
                stop = ends[i] if i < len(ends) else len(chunk)
                if not chunk[starts[i] : stop].strip():
                    starts[i] = -1
            parts.append(starts[starts >= 0].astype(np.int64) + base)
            base += len(chunk)
    return np.concatenate([*parts, np.array([base], dtype=np.int64)])


def _close(file: int, scan: BinaryIO | None) -> None:
    os.close(file)
    if scan is not None:
        scan.close()


def _fingerprint(path: Path, num_rows: int | None) -> dict[str, Any]:
    size = path.stat().st_size
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        digest.update(file.read(_HEAD_BYTES))
        file.seek(max(0, size - _HEAD_BYTES))
        digest.update(file.read(_HEAD_BYTES))
    return {"path": str(path), "size": size, "num_rows": num_rows, "sha256": digest.hexdigest()}
