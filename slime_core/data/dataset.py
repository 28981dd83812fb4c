"""JSONL or parquet file -> rows by index, without holding the file in memory.

`prompts.py` and the evaluation read through this. A JSONL file costs 8 bytes per row (the offset of each line). A
plugin reads parquet (entry-point group `slime.data`). Row `i` is not line `i + 1`, since blank lines do not count and
`path@[a:b]` shifts; `where(i)` names the place in the file.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import weakref
from collections.abc import Callable, Mapping
from datetime import date, time
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from slime_core.distributions import provided
from slime_core.errors import DataError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Offsets: TypeAlias = NDArray[np.int64]

Row: TypeAlias = dict[str, Any]

_SLICE = re.compile(r"^(?P<path>.*)@\[(?P<start>-?\d*):(?P<stop>-?\d*)\]$")
_LONG_INTEGER = re.compile(rb"((?:[:\[,\s-]|^)\d{18})\d+")
_READ_BYTES = 8 << 20
_HEAD_BYTES = 1 << 16


class Rows(Protocol):
    """The rows of one file, after slicing. Reading a bad row raises DataError with the row's place."""

    path: Path

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Row: ...

    def where(self, index: int) -> str:
        """Return `file:line` or `file, row n`, for messages."""

    def fingerprint(self) -> dict[str, object]:
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
    reader: Callable[[Path, slice], Rows] | None = None
    lines = path.suffix.lower() in (".jsonl", ".ndjson")
    if lines:
        reader = provided("slime.data", "streamed").StreamedRows if stream else JsonlRows
    elif path.suffix.lower() == ".parquet":
        reader = provided("slime.data", "parquet").ParquetRows
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
        if stream and lines and rows_slice != slice(None):
            raise DataError(f"{origin} {spec}: --streaming-data reads whole files; leave one of the two out")
        rows = reader(path, rows_slice)
        if not has_row(rows, 0):
            raise DataError(f"{origin} {spec}: no rows")
        for index in {0} if stream and lines else {0, len(rows) - 1}:
            rows[index]
    except OSError as error:
        raise DataError(f"{origin} {spec}: cannot be read: {error.strerror}") from error
    return rows


def has_row(rows: Rows, index: int) -> bool:
    """Return whether row `index` exists; a streamed file is read only up to that row."""
    reaches: Callable[[int], bool] | None = getattr(rows, "reaches", None)
    return index < len(rows) if reaches is None else reaches(index)


def exact_json(text: bytes) -> Any:
    """Parse JSON, integers of more than 64 bits included.

    Raises:
        ValueError: The text is not JSON (JSONDecodeError), or an integer has more digits than Python reads.
    """
    import orjson

    rest, longs = _LONG_INTEGER.subn(rb"\1", text)
    value = orjson.loads(rest)  # refuses what `json` reads: NaN, half of a surrogate pair, nesting without end
    return json.loads(text) if longs else value  # orjson makes floats of such integers


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
        self._opened = fingerprint_of(path, len(self))
        self._close: weakref.finalize[..., Any] = weakref.finalize(self, os.close, self._file)

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

    def fingerprint(self) -> dict[str, object]:
        """Return the values that a resumed run compares, as they were when the file was opened."""
        return self._opened

    def close(self) -> None:
        """Close the file; safe to call twice."""
        self._close()


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


def fingerprint_of(path: Path, num_rows: int | None) -> dict[str, object]:
    """Return what `Rows.fingerprint` returns, for a file as it is now."""
    size = path.stat().st_size
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        digest.update(file.read(_HEAD_BYTES))
        file.seek(max(0, size - _HEAD_BYTES))
        digest.update(file.read(_HEAD_BYTES))
    return {"path": str(path), "size": size, "num_rows": num_rows, "sha256": digest.hexdigest()}
