"""Says which reward holds up the event loop: an `async def` that computes instead of waiting stops every other sample.

`adapters.RewardCaller` drives coroutines through `watched` and inline functions through `watching`, which note what
runs; a daemon thread looks at the note four times a second, so that a call that never gives the loop back is reported
while it blocks. What a reader would get wrong: nothing is interrupted, since nothing can be; no deadline is kept
while the loop is blocked.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Generator
from typing import Any, Generic, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")

THRESHOLD = 1.0
"""Seconds without giving the loop back that are worth a warning."""
_POLL = 0.25


class _Watch:
    """The one note of a process: which label runs on which thread since when."""

    def __init__(self) -> None:
        self._running: tuple[str, int, float] | None = None
        self._reported: set[str] = set()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def enter(self, label: str) -> tuple[str, int, float] | None:
        """Note what starts to run; returns what ran before."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._look, name="slime-loop-watch", daemon=True)
            self._thread.start()
        before, self._running = self._running, (label, threading.get_ident(), time.perf_counter())
        return before

    def leave(self, before: tuple[str, int, float] | None) -> None:
        """Undo `enter`; reports a step that was long, also where it kept the watching thread from running."""
        note, self._running = self._running, before
        if note is not None and (seconds := time.perf_counter() - note[2]) > THRESHOLD:
            self._report(note[0], seconds, None)

    def _look(self) -> None:
        while True:
            time.sleep(_POLL)
            note = self._running
            if note is not None and (seconds := time.perf_counter() - note[2]) > THRESHOLD:
                self._report(note[0], seconds, sys._current_frames().get(note[1]))

    def _report(self, label: str, seconds: float, frame: Any) -> None:
        with self._lock:
            if label in self._reported:
                return
            self._reported.add(label)
        place = ""
        if frame is not None:
            innermost = traceback.extract_stack(frame)[-1]
            place = f" (now at {innermost.filename}:{innermost.lineno})"
        logger.warning(
            "%s has kept the event loop busy for %.1f s without awaiting%s; every other sample waits for it, and no"
            " deadline can end it. Make it a plain function, or declare RewardTraits(execution='process') on it",
            label, seconds, place,
        )  # fmt: skip


_WATCH = _Watch()


class watching:
    """`with watching(label):` around a call on the event loop's thread."""

    def __init__(self, label: str) -> None:
        self._label = label

    def __enter__(self) -> None:
        self._before = _WATCH.enter(self._label)

    def __exit__(self, *raised: object) -> None:
        _WATCH.leave(self._before)


class watched(Generic[T]):
    """`await watched(label, coroutine)`: the coroutine's result, each of its steps under watch."""

    def __init__(self, label: str, value: Awaitable[T]) -> None:
        self._label = label
        self._value = value

    def __await__(self) -> Generator[Any, Any, T]:
        label, steps = self._label, self._value.__await__()
        send: Any = getattr(steps, "send", None)
        answer, error = None, None
        while True:
            before = _WATCH.enter(label)
            try:
                if error is not None:
                    yielded = steps.throw(error)
                else:
                    yielded = next(steps) if send is None or answer is None else send(answer)
            except StopIteration as stop:
                result: T = stop.value
                return result
            finally:
                _WATCH.leave(before)
            error = None
            try:
                answer = yield yielded
            except GeneratorExit:
                close = getattr(steps, "close", None)
                if close is not None:
                    close()
                raise
            except BaseException as thrown:
                error = thrown
