"""Read the new lines of a growing file of JSON lines (`Tail`)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson


class Tail:
    """A reader of one file, which need not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def new(self) -> Iterator[dict[str, Any]]:
        """Yield the complete lines since the last call; lines broken by a kill are skipped."""
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
