"""What a person sees between a command and its first rollout: a line every few seconds, with what is waited for.

    with telling_start():          the commands that run something, before their first heavy import
        ...
        first_results()            whoever prints results, from the first on: nothing more is told

The lines go to standard error, every three seconds; where that is no terminal, every half minute once two minutes are
over, so that a start of hours does not fill a log. It is a daemon thread that reads the table of waits; what waits
nowhere is told by no more than the time.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from slime_core.waits.table import Wait, current

OFTEN_S, SELDOM_S = 2.5, 30.0
"""Seconds between lines; a busy machine may make three of the first."""
_PATIENT_S = 120.0
"""How long a log gets a line as often as a terminal."""
_over: threading.Event | None = None


@contextmanager
def telling_start() -> Iterator[None]:
    """Tell of the start until `first_results`, or the end of the block."""
    global _over
    if os.environ.get("RANK", "0") != "0":  # torchrun's: one process tells
        yield
        return
    over = _over = threading.Event()
    # A rank that another process has started is not the beginning of what a person waits for.
    first = OFTEN_S / 3 if "RANK" in os.environ else OFTEN_S
    threading.Thread(target=_tell, args=(over, first), name="slime-start", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def first_results() -> None:
    """There is something better to read from now on; nothing happens outside of `telling_start`."""
    if _over is not None:
        _over.set()


@contextmanager
def part_of_start() -> Iterator[None]:
    """Around a run within the start, as a recipe's: its results are not the command's."""
    global _over
    before, _over = _over, None
    try:
        yield
    finally:
        _over = before


def _tell(over: threading.Event, first: float) -> None:
    since, pause = time.monotonic(), first
    while not over.wait(pause):
        often = sys.stderr.isatty() or time.monotonic() - since < _PATIENT_S
        pause = OFTEN_S if often else SELDOM_S
        wait = _innermost(current())
        what = "" if wait is None else f": {wait.what}, {wait.age:.0f} s"
        try:
            print(f"slime: starting for {time.monotonic() - since:.0f} s{what}", file=sys.stderr, flush=True)
        except OSError:  # nobody reads it any more, which is for those to say who have results
            return


def _innermost(waits: list[Wait]) -> Wait | None:
    """The newest wait of the main thread itself; where it turns an event loop, the oldest there is."""
    main = [wait for wait in waits if wait.thread == threading.main_thread().ident and wait.loop is None]
    if main:
        return max(main, key=lambda wait: wait.since)
    return min(waits, key=lambda wait: wait.since, default=None)
