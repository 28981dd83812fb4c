"""SIGTERM (docker stop, a scheduler, `kill`) ends a command the way ctrl-C does: engines, workers and hooks are told.

A run that trains gets the first signal of either kind as a request to drain instead (`launch/drain.py`). For all else,
`cli.main` runs every command inside `Termination`. SIGTERM is handed to whoever handles SIGINT at the time, so an
event loop cancels its tasks first. A command started with `&` in a script ignores
SIGINT, and children that a user's code forks inherit the handler; neither may change what SIGTERM does to them.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, NoReturn

from slime_core.launch import drain
from slime_core.waits import asked_to_end


class Termination:
    """`with Termination() as termination:` until its end, SIGTERM raises KeyboardInterrupt and is remembered."""

    def __init__(self) -> None:
        self.asked = False
        """Whether a SIGTERM has come that was no request to drain."""
        self.interrupted = False
        """Whether a run was asked by ctrl-C to drain."""
        self._last = float("-inf")
        self._owner = os.getpid()
        self._before: Any = None

    def __enter__(self) -> Termination:
        # Only the main thread may; only the default is replaced, since another handler is somebody's decision.
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self._before = signal.signal(signal.SIGTERM, self._on_signal)
            drain.handle_interrupts(self._on_interrupt)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
            drain.handle_interrupts(None)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._owner:  # a forked child
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
            return
        now = time.monotonic()
        training = drain.current()
        if now - self._last < drain.SAME_REQUEST and not (training is not None and training.late):
            return
        self._last = now
        if training is not None and training.ask(signal.SIGTERM):
            return
        self.asked = True
        asked_to_end(128 + signal.SIGTERM, at_once=True)
        _interrupt(frame)

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        """SIGINT inside of a drain."""
        training = drain.current()
        if training is not None and training.ask(signal.SIGINT):
            self.interrupted = True
        else:
            _interrupt(frame)


@contextmanager
def no_silent_exit() -> Iterator[None]:
    """Have `os._exit` name its caller in this process, and never succeed: nothing is committed or summed up then."""
    own, owner = os._exit, os.getpid()

    def named_exit(status: int) -> NoReturn:
        caller = sys._getframe(1)
        ours = str(caller.f_globals.get("__name__")).startswith("slime_core.")
        if os.getpid() == owner and not ours:  # not in a child that user code forked
            place = f"{caller.f_code.co_name} ({caller.f_code.co_filename}:{caller.f_lineno})"
            said = f"{place} called os._exit({status}), which ends the process without a commit or a summary"
            print(f"slime: error: {said}", file=sys.stderr, flush=True)
            status = status or 1
        own(status)

    os._exit = named_exit
    try:
        yield
    finally:
        os._exit = own


def _interrupt(frame: FrameType | None) -> None:
    handler = drain.interrupt_handler()
    if not callable(handler):
        raise KeyboardInterrupt
    handler(signal.SIGINT, frame)
