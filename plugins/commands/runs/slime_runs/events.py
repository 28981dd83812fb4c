"""`events.jsonl` in the run directory: what happened to the engines, one line each, appended as it happens.

Threads write it; a killed run leaves at most one torn last line. It is a record of incidents, not of the training, so a
resumed run appends to it and cuts nothing off.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import orjson

FILE = "events.jsonl"


class EventLog:
    """Appends events. `directory` None keeps none; it is created when the first event comes."""

    def __init__(self, directory: Path | None) -> None:
        self._path = None if directory is None else directory / FILE
        self._lock = threading.Lock()

    def write(self, event: str, **details: Any) -> None:
        """One line: `time` (seconds since 1970), `event`, and the details. Raises OSError."""
        if self._path is None:
            return
        line = orjson.dumps({"time": round(time.time(), 3), "event": event, **details}) + b"\n"
        with self._lock:
            self._path.parent.mkdir(exist_ok=True)
            with self._path.open("ab") as file:
                file.write(line)
