"""SIGTERM during training: finish or interrupt what runs, commit, exit 0: a scheduler's preemption costs little.

A launcher puts `with Drain(seconds) as drain:` around its loop; the command's SIGTERM handler (`cli/termination.py`)
offers the first signal to `current()`::

    SIGTERM --> Drain.ask --> drain.asked, and every `on_ask` callback   rollout stage: interrupt the rollout
                          \\-> clock of --drain-timeout --> SIGTERM again: the run ends at once, exit status 143

The loop commits and returns early. What a reader would get wrong: outside of such a block, and for every other command,
SIGTERM means ctrl-C as ever; a second signal does inside it, too. Ranks other than 0 take their turn from rank 0's
messages, so for them a drain is only to outlive a signal that all processes get.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

from slime_core.errors import TrainError

_current: Drain | None = None


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
        self._owner = os.getpid()
        self._callbacks: list[Callable[[], None]] = []
        self._clock: threading.Timer | None = None
        self._outer: Drain | None = None

    def __enter__(self) -> Drain:
        global _current
        self._outer, _current = _current, self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _current
        _current = self._outer
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

    def ask(self, why: str) -> bool:
        """Ask for the end, for the reason `why`; False when that has been done before, so it is to be now.

        Any thread may call it, and a signal handler.
        """
        if self.asked or os.getpid() != self._owner:
            return False
        self.asked = True
        self._clock = threading.Timer(self.seconds, self._end)
        self._clock.daemon = True
        self._clock.start()
        if not self._quiet:
            print(
                f"slime: {why}: ending with a commit, within {self.seconds:g} s (--drain-timeout);"
                " a second signal ends the run at once",
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
                f"slime: not done {self.seconds:g} s after SIGTERM (--drain-timeout): ending without a commit;"
                " earlier commits are intact",
                file=sys.stderr, flush=True,
            )  # fmt: skip
        os.kill(self._owner, signal.SIGTERM)


def current() -> Drain | None:
    """The drain of the run that this process is in the middle of."""
    return _current


@contextmanager
def outliving() -> Iterator[None]:
    """Around the loop of a rank other than 0: SIGTERM changes nothing, since rank 0 says when to end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
