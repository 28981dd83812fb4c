"""`--streaming-data`: a JSONL file whose lines are located as rows are read.

`data.dataset.open_rows` finds it (entry-point group `slime.data`).
"""

from __future__ import annotations

import os
import threading
import weakref
from array import array
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from slime_core.data.dataset import JsonlRows, fingerprint_of

if TYPE_CHECKING:
    from slime_core.data.dataset import Offsets


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
        self._opened = fingerprint_of(path, None)
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


def _close(file: int, scan: BinaryIO) -> None:
    os.close(file)
    scan.close()
