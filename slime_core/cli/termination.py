"""End a command on SIGTERM (docker stop, a scheduler, `kill`) as on ctrl-C: stop engines and workers, notify hooks.

A training run treats the first signal of either kind as a request to drain instead (`launch/drain.py`). For all other
cases, `cli.main` runs every command inside `Termination`. SIGTERM is passed to the current SIGINT handler, so an event
loop cancels its tasks first. A command started with `&` in a script ignores SIGINT, and children forked by user code
inherit the handler; SIGTERM still has its usual effect on both.
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
    """A context manager inside which SIGTERM raises KeyboardInterrupt and is recorded."""

    def __init__(self) -> None:
        self.asked = False
        """True once a SIGTERM arrived that was not a request to drain."""
        self.interrupted = False
        """True once ctrl-C requested a run to drain."""
        self._last = float("-inf")
        self._owner = os.getpid()
        self._before: Any = None

    def __enter__(self) -> Termination:
        # Only the main thread may set handlers. Only the default is replaced: another handler was set on purpose.
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self._before = signal.signal(signal.SIGTERM, self._on_signal)
            handlers = {signal.SIGTERM: self._on_signal, signal.SIGINT: self._on_interrupt}
            if not callable(signal.getsignal(signal.SIGINT)):  # a shell's background job ignores it
                del handlers[signal.SIGINT]
            drain.handle_signals(handlers)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
            drain.handle_signals({})

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
        """Handle SIGINT during a drain."""
        training = drain.current()
        if training is not None and training.ask(signal.SIGINT):
            self.interrupted = True
        else:
            _interrupt(frame)


@contextmanager
def no_silent_exit() -> Iterator[None]:
    """Make `os._exit` print its caller and exit nonzero in this process, since it skips the commit and the summary."""
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
