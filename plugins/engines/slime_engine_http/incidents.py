"""Every incident of the engines, told three times: a line in the log, a line in `events.jsonl`, and metrics.

The supervisor reports here; the rollout stage takes the metrics once per rollout. A disk that refuses the file must not
end a recovery, so that is logged once and the run goes on.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from typing import Any

from slime_runs.events import EventLog

logger = logging.getLogger(__name__)

_COUNTED = {
    "restarted": "engine/restarts",
    "router_restarted": "engine/router_restarts",
    "quarantined": "engine/quarantined",
}
_GOOD = frozenset({"restarted", "readmitted", "router_restarted"})


class Incidents:
    """Thread-safe."""

    def __init__(self, events: EventLog) -> None:
        self._events = events
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._recovery = 0.0
        self._file_failed = False

    def tell(self, event: str, engine: str, url: str, reason: str = "", seconds: float | None = None) -> None:
        """Record one. `seconds`: how long the engine was out, where it is back."""
        with self._lock:
            self._counts[event] += 1
            if seconds is not None:
                self._recovery = max(self._recovery, seconds)
        text = f"{engine} ({url}) {event.replace('_', ' ')}"
        text += f" after {seconds:.1f} s" if seconds is not None else ""
        text += f": {reason.splitlines()[0]}" if reason else ""  # the rest is the end of a log, kept in the record
        logger.log(logging.INFO if event in _GOOD else logging.WARNING, "%s", text)
        details: dict[str, Any] = {"engine": engine, "url": url, "reason": reason}
        if seconds is not None:
            details["seconds"] = round(seconds, 3)
        try:
            self._events.write(event, **details)
        except OSError as error:
            if not self._file_failed:
                logger.warning("the record of engine events cannot be written: %s", error)
            self._file_failed = True

    def take_metrics(self) -> dict[str, float]:
        """Counts since the last call, and the longest time that an engine which came back had been out (seconds)."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
            recovery, self._recovery = self._recovery, 0.0
        return {name: float(counts[event]) for event, name in _COUNTED.items()} | {"engine/recovery_time": recovery}
