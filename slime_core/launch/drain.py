"""Drain on SIGTERM or ctrl-C during training: finish or interrupt running work and commit, so no weights are lost.

A launcher puts `with Drain(seconds) as drain:` around its loop. The command's handlers of both signals (`Termination`)
pass the first signal to `current()`::

    signal --> Drain.ask --> drain.asked, and every `on_ask` callback   rollout stage: interrupt the rollout
                         \\-> clock of --drain-timeout --> SIGTERM: the run ends at once, exit status 143

The loop commits and returns early. Both signals end the process at once outside of such a block, for every other
command, and as the second signal inside the block. Ctrl-C also does so if slime is called from a program, which has its
own use for ctrl-C. Ranks other than 0 follow rank 0's messages, so they only need to survive a signal that all
processes receive.

`cli.main` runs every command inside `Termination`, where SIGTERM (docker stop, a scheduler, `kill`) ends the command as
ctrl-C does: it is passed to the current SIGINT handler, so an event loop cancels its tasks first. A command started
with `&` in a script ignores SIGINT, and children forked by user code inherit the handler; SIGTERM still has its usual
effect on both.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

from slime_core.errors import TrainError
from slime_core.waits import asked_to_end

logger = logging.getLogger(__name__)

_SAME_REQUEST = 1.0
"""Seconds within which two signals count as one: `timeout` and schedulers signal a process and then its group."""
_NAMES = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "ctrl-C"}
_current: Drain | None = None
_of_command: Mapping[signal.Signals, Callable[[int, FrameType | None], None]] = {}


def collect_seldom() -> None:
    """Let the garbage collector run less often, unless the program around has it off or set to run more rarely."""
    # With Python's 700, repeated scans of samples and tasks take more than half of the CPU time of dispatching a large
    # rollout (`benchmarks/overhead.py`).
    if 0 < gc.get_threshold()[0] < 50_000:
        gc.set_threshold(50_000, 20, 10)


class Drain:
    """A request to end soon, with a deadline.

    Args:
        seconds: `--drain-timeout`: time from the request until the run is ended without a commit.
        quiet: Print nothing, because another process prints.
    """

    def __init__(self, seconds: float, *, quiet: bool = False) -> None:
        self.seconds = seconds
        self.asked = False
        """True once the run is to end early. Any thread may read it; it never becomes False again."""
        self.late = False
        """True once the deadline has passed."""
        self._quiet = quiet
        self.number = signal.SIGTERM
        """The signal that requested the drain."""
        self._since = 0.0
        self._before: dict[signal.Signals, Any] = {}
        """Handlers that this drain replaced."""
        self._restored = False
        self._owner = os.getpid()
        self._callbacks: list[Callable[[], None]] = []
        self._clock: threading.Timer | None = None
        self._outer: Drain | None = None

    def __enter__(self) -> Drain:
        global _current
        self._outer, _current = _current, self
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, handler) for number, handler in _of_command.items()}
        return self

    def __exit__(self, *error: object) -> None:
        global _current
        _current = self._outer
        for number, handler in self._before.items():
            signal.signal(number, handler or signal.SIG_DFL)
        if self._clock is not None:
            self._clock.cancel()

    def on_ask(self, callback: Callable[[], None]) -> None:
        """Register a callback for the drain request; call it now if the request was already made.

        The requesting thread calls it. A signal may interrupt that thread anywhere, so the callback must return at once
        and take no lock.
        """
        self._callbacks.append(callback)
        if self.asked:
            callback()

    def stops(self) -> bool:
        """Return `asked`, and restore the handlers that user code has replaced, with a warning."""
        for number in self._before if threading.current_thread() is threading.main_thread() else ():
            if signal.getsignal(number) == _of_command[number]:
                continue
            signal.signal(number, _of_command[number])
            if not self._restored:
                logger.warning("user code replaced the handler of %s, which ends a run; restored", _NAMES[number])
            self._restored = True
        return self.asked

    def ask(self, number: signal.Signals) -> bool:
        """Request the drain for signal `number`; return False for a second request, which must end the run at once.

        Any thread and any signal handler may call it.
        """
        if os.getpid() != self._owner:
            return False
        if self.asked:
            return not self.late and time.monotonic() - self._since < _SAME_REQUEST
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
        """Raise TrainError if the run could recover from `error` but was already requested to end."""
        if self.asked:
            raise TrainError(f"{error}; not restarted, since the run was asked to end") from error

    def _end(self) -> None:
        """End the run when the deadline has passed, as a second signal does."""
        self.late = True
        if not self._quiet:
            print(
                f"slime: not done {self.seconds:g} s after {_NAMES[self.number]} (--drain-timeout): ending without a"
                " commit; earlier commits are intact",
                file=sys.stderr, flush=True,
            )  # fmt: skip
        os.kill(self._owner, signal.SIGTERM)


def current() -> Drain | None:
    """Return the drain of the run in progress in this process; None without a run."""
    return _current


def interrupt_handler() -> Any:
    """Return the SIGINT handler for signals that do not request a drain: a second signal, or one outside any drain."""
    own = None if _current is None else _current._before.get(signal.SIGINT)
    return signal.getsignal(signal.SIGINT) if own is None else own


def handle_signals(handlers: Mapping[signal.Signals, Callable[[int, FrameType | None], None]]) -> None:
    """Set the command's handlers for all later drains; drains leave other signals unchanged."""
    global _of_command
    _of_command = handlers


@contextmanager
def outliving() -> Iterator[None]:
    """Ignore a first signal around the loop of a rank other than 0, since rank 0 decides when to end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    first: list[float] = []

    def on_signal(number: int, frame: FrameType | None) -> None:
        first.append(time.monotonic())
        if first[-1] - first[0] >= _SAME_REQUEST:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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
            handle_signals(handlers)
        return self

    def __exit__(self, *error: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
            handle_signals({})

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._owner:  # a forked child
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
            return
        now = time.monotonic()
        training = current()
        if now - self._last < _SAME_REQUEST and not (training is not None and training.late):
            return
        self._last = now
        if training is not None and training.ask(signal.SIGTERM):
            return
        self.asked = True
        asked_to_end(128 + signal.SIGTERM, at_once=True)
        _interrupt(frame)

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        """Handle SIGINT during a drain."""
        training = current()
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
    handler = interrupt_handler()
    if not callable(handler):
        raise KeyboardInterrupt
    handler(signal.SIGINT, frame)
