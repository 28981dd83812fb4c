"""SIGTERM or ctrl-C during training: finish or interrupt what runs, and commit, so that no trained weights are lost.

A launcher puts `with Drain(seconds) as drain:` around its loop; the command's handlers of both signals
(`cli/termination.py`) offer the first one to `current()`::

    signal --> Drain.ask --> drain.asked, and every `on_ask` callback   rollout stage: interrupt the rollout
                         \\-> clock of --drain-timeout --> SIGTERM: the run ends at once, exit status 143

The loop commits and returns early. Outside of such a block, for every other command, and as the second signal inside of
it, both end the process at once; ctrl-C also where slime is called from a program, which has a use of its own for it.
Ranks other than 0 take their turn from rank 0's messages, so for them a drain is only to outlive a signal that all
processes get.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

from slime_core.errors import TrainError
from slime_core.waits import asked_to_end

SAME_REQUEST = 1.0
"""Seconds: `timeout` and schedulers signal a process and then its group, which is one request and not two."""
_NAMES = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "ctrl-C"}
_current: Drain | None = None
_of_command: Callable[[int, FrameType | None], None] | None = None


class Drain:
    """A request to end soon, with a deadline.

    Args:
        seconds: `--drain-timeout`: from the request until the run is ended at once.
        quiet: Say nothing; another process does.
    """

    def __init__(self, seconds: float, *, quiet: bool = False) -> None:
        self.seconds = seconds
        self.asked = False
        """Whether the run is to end early. Any thread may read it; it never becomes False again."""
        self.late = False
        """Whether the deadline has passed."""
        self._quiet = quiet
        self.number = signal.SIGTERM
        """The signal that asked."""
        self._since = 0.0
        self._on_interrupt: Any = None
        """What handled SIGINT before; None where this does not handle it."""
        self._owner = os.getpid()
        self._callbacks: list[Callable[[], None]] = []
        self._clock: threading.Timer | None = None
        self._outer: Drain | None = None

    def __enter__(self) -> Drain:
        global _current
        self._outer, _current = _current, self
        at_main = threading.current_thread() is threading.main_thread()
        if _of_command is not None and at_main and callable(signal.getsignal(signal.SIGINT)):
            self._on_interrupt = signal.signal(signal.SIGINT, _of_command)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _current
        _current = self._outer
        if self._on_interrupt is not None:
            signal.signal(signal.SIGINT, self._on_interrupt)
        if self._clock is not None:
            self._clock.cancel()

    def on_ask(self, callback: Callable[[], None]) -> None:
        """Have `callback` called when asked (at once, if that was before).

        It is called in the thread that asks, for a signal in the middle of anything: it must return at once and take
        no lock.
        """
        self._callbacks.append(callback)
        if self.asked:
            callback()

    def ask(self, number: signal.Signals) -> bool:
        """Ask for the end, as that signal does; False when that is a second request, so it is to be now.

        Any thread may call it, and a signal handler.
        """
        if os.getpid() != self._owner:
            return False
        if self.asked:
            return not self.late and time.monotonic() - self._since < SAME_REQUEST
        self.asked, self.number, self._since = True, number, time.monotonic()
        asked_to_end(128 + number)
        self._clock = threading.Timer(self.seconds, self._end)
        self._clock.daemon = True
        self._clock.start()
        if not self._quiet:
            print(
                f"slime: {_NAMES[number]}: ending with a commit of what is trained, within {self.seconds:g} s"
                " (--drain-timeout); a second signal ends the run at once",
                file=sys.stderr, flush=True,
            )  # fmt: skip
        for callback in self._callbacks:
            callback()
        return True

    def check_goes_on(self, error: Exception) -> None:
        """Raise TrainError where a run could be brought back from `error` but is to end anyway."""
        if self.asked:
            raise TrainError(f"{error}; not restarted, since the run was asked to end") from error

    def _end(self) -> None:
        """The deadline has passed: what a second signal does."""
        self.late = True
        if not self._quiet:
            print(
                f"slime: not done {self.seconds:g} s after {_NAMES[self.number]} (--drain-timeout): ending without a"
                " commit; earlier commits are intact",
                file=sys.stderr, flush=True,
            )  # fmt: skip
        os.kill(self._owner, signal.SIGTERM)


def current() -> Drain | None:
    """The drain of the run that this process is in the middle of."""
    return _current


def interrupt_handler() -> Any:
    """What SIGINT does where it is no request to drain: for a second signal, and outside of every drain."""
    own = None if _current is None else _current._on_interrupt
    return signal.getsignal(signal.SIGINT) if own is None else own


def handle_interrupts(handler: Callable[[int, FrameType | None], None] | None) -> None:
    """Have SIGINT handled by the command around every drain to come; None leaves it as it is."""
    global _of_command
    _of_command = handler


@contextmanager
def outliving() -> Iterator[None]:
    """Around the loop of a rank other than 0: a first signal changes nothing, since rank 0 says when to end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    first: list[float] = []

    def on_signal(number: int, frame: FrameType | None) -> None:
        first.append(time.monotonic())
        if first[-1] - first[0] >= SAME_REQUEST:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
