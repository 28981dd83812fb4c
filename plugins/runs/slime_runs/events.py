"""`events.jsonl` in the run directory: events of the engines, one per line, appended as they happen.

Several threads write the file; a killed run leaves at most one torn last line. The file records incidents, not
training, so a resumed run appends to it and removes nothing.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import orjson

FILE = "events.jsonl"


class EventLog:
    """An appender of events to a file, created with its directory at the first event; `directory` None writes none."""

    def __init__(self, directory: Path | None) -> None:
        self._path = None if directory is None else directory / FILE
        self._lock = threading.Lock()

    def write(self, event: str, **details: Any) -> None:
        """Append a line with `time` (seconds since 1970), `event` and the details. Raises OSError."""
        if self._path is None:
            return
        line = orjson.dumps({"time": round(time.time(), 3), "event": event, **details}) + b"\n"
        with self._lock:
            self._path.parent.mkdir(exist_ok=True)
            with self._path.open("ab") as file:
                file.write(line)
