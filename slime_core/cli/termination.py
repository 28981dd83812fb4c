"""SIGTERM (docker stop, a scheduler, `kill`) ends a command the way ctrl-C does: engines, workers and hooks are told.

A run that trains gets the first one as a request to drain instead (`launch/drain.py`). For all else,
`cli.main` runs every command inside `Termination`. The signal is handed to whoever handles SIGINT at the time, so an
event loop cancels its tasks first. What a reader would get wrong: a command started with `&` in a script ignores
SIGINT, and children that a user's code forks inherit the handler; neither may change what SIGTERM does to them.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

from slime_core.launch import drain

_SAME_REQUEST = 1.0
"""Seconds: `timeout` and schedulers signal a process and then its group, which is one request and not two."""


class Termination:
    """`with Termination() as termination:` until its end, SIGTERM raises KeyboardInterrupt and is remembered."""

    def __init__(self) -> None:
        self.asked = False
        """Whether a SIGTERM has come."""
        self._last = float("-inf")
        self._owner = os.getpid()
        self._before: Any = None

    def __enter__(self) -> Termination:
        # Only the main thread may; only the default is replaced, since another handler is somebody's decision.
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self._before = signal.signal(signal.SIGTERM, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._owner:  # a forked child
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
            return
        now = time.monotonic()
        training = drain.current()
        if now - self._last < _SAME_REQUEST and not (training is not None and training.late):
            return
        self._last = now
        if training is not None and training.ask("SIGTERM"):
            return
        self.asked = True
        interrupt = signal.getsignal(signal.SIGINT)
        if callable(interrupt):
            interrupt(signal.SIGINT, frame)
        else:
            raise KeyboardInterrupt
