"""A file of JSON lines that grows: what was added since the last time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson


class Tail:
    """Of one file, which need not be there yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def new(self) -> Iterator[dict[str, Any]]:
        """The lines that are whole; those that a kill tore are left out."""
        if not self._path.is_file():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                try:
                    yield orjson.loads(line)
                except orjson.JSONDecodeError:
                    continue
