"""A thread and a queue for each tracker, which never blocks the run; its exceptions are logged as warnings.

::

    hooks --put--> queue (bounded) --> thread: open, metrics, rollout, ... close
                     | full: the newest message is lost, and counted
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)

_ROOM = 1000
"""Size of the queue in messages; a tracker with a full queue counts as hanging."""
_MOST_FAILURES = 5
"""Consecutive failures after which a tracker is not called any more."""


class Worker:
    """The run's handle of a tracker and its thread."""

    def __init__(self, name: str, deadline: float) -> None:
        """`deadline` is the time in seconds that `close` waits."""
        self._name, self._deadline = name, deadline
        self._queue: queue.Queue[tuple[str, tuple[Any, ...]] | None] = queue.Queue(_ROOM)
        self._thread: threading.Thread | None = None
        self._lost = self._failures = 0
        self._ended = False

    def start(self, make: Callable[..., Any], *values: Any) -> None:
        """Start the thread, which constructs the tracker as `make(*values)`."""
        work = threading.Thread(target=self._work, args=(make, values), name=f"slime-{self._name}", daemon=True)
        work.start()
        self._thread = work

    def put(self, method: str, *values: Any) -> None:
        """Queue a call of the tracker's method, and return at once."""
        if self._ended:
            self._lost += 1
            return
        try:
            self._queue.put_nowait((method, values))
        except queue.Full:
            self._lost += 1
            if self._lost == 1:
                logger.warning("tracker %s is %d messages behind; what follows is lost to it", self._name, _ROOM)

    def close(self) -> None:
        """Wait for the thread to finish; after the deadline abandon it with a warning."""
        if self._thread is None:
            return
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=self._deadline)
        self._thread.join(self._deadline)
        if self._thread.is_alive():
            logger.warning(
                "tracker %s has not ended within %g s (plugins.trackers.deadline); %d messages are lost to it",
                self._name, self._deadline, self._queue.qsize() + self._lost,
            )  # fmt: skip
        elif self._lost:
            logger.warning("tracker %s: %d messages are lost to it", self._name, self._lost)

    # -- in the thread -------------------------------------------------------------------------------------

    def _work(self, make: Callable[..., Any], values: tuple[Any, ...]) -> None:
        try:
            tracker = make(*values)
        except BaseException as error:  # SystemExit of a library included: the thread is all that ends
            self._ended = True
            logger.warning("tracker %s cannot start: %s: %s", self._name, type(error).__name__, _line(error))
            return
        while (message := self._queue.get()) is not None and not self._ended:
            self._do(getattr(tracker, message[0], None), message[1])
        self._do(tracker.close, ())

    def _do(self, call: Callable[..., None] | None, values: tuple[Any, ...]) -> None:
        try:
            if call is not None:
                call(*values)
                self._failures = 0
        except BaseException as error:
            self._failures += 1
            self._lost += 1
            self._ended = self._failures >= _MOST_FAILURES
            if self._failures == 1 or self._ended:
                end = "; it is asked no more" if self._ended else ""
                logger.warning("tracker %s: %s: %s%s", self._name, type(error).__name__, _line(error), end)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
