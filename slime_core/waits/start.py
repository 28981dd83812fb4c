"""Progress lines between a command and its first rollout: they name the current wait while there is no other output.

    with telling_start():          in commands that run something, before their first heavy import
        ...
        first_results()            in code that prints results, at the first result: ends the progress lines

After ten seconds without output, a terminal gets one line, which is rewritten until there is other output. Without a
terminal, a line is printed every ten seconds, and after two minutes every 30 seconds, so that a start of hours does not
fill a log. A daemon thread reads the table of waits and writes to standard error.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from slime_core.secrets import Masked
from slime_core.waits.table import Wait, current

_QUIET_S, _SELDOM_S = 10.0, 30.0
"""Seconds without output before a line: in the first two minutes, and after them if there is no terminal."""
_PATIENT_S = 120.0
_REWRITE_S = 1.0
"""Seconds between two updates of the line on a terminal."""
_over: threading.Event | None = None


@contextmanager
def telling_start() -> Iterator[None]:
    """Print progress of the start until `first_results` or the end of the block."""
    global _over
    if os.environ.get("RANK", "0") != "0":  # set by torchrun: only rank 0 prints
        yield
        return
    over = _over = threading.Event()
    threading.Thread(target=_tell, args=(over,), name="slime-start", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def first_results() -> None:
    """End the progress lines, because results are printed from now on; no effect outside of `telling_start`."""
    if _over is not None:
        _over.set()


@contextmanager
def part_of_start() -> Iterator[None]:
    """Keep the progress lines during a run within the start, e.g. a recipe's: ignore its `first_results`."""
    global _over
    before, _over = _over, None
    try:
        yield
    finally:
        _over = before


def _tell(over: threading.Event) -> None:
    since = said = time.monotonic()
    pause = _QUIET_S
    while not over.wait(pause):
        now = time.monotonic()
        limit = _SELDOM_S if now - since > _PATIENT_S and not sys.stderr.isatty() else _QUIET_S
        quiet = now - max(said, Masked.written)
        if quiet < limit:
            pause = limit - quiet
            continue
        wait = _innermost(current())
        what = "" if wait is None else f": {wait.what}, {wait.age:.0f} s"
        text = f"slime: starting for {now - since:.0f} s{what}"
        try:
            if isinstance(sys.stderr, Masked) and sys.stderr.isatty():
                sys.stderr.show_status(text)
                pause = _REWRITE_S
            else:
                print(text, file=sys.stderr, flush=True)
                said, pause = now, limit
        except OSError:  # the reader is gone; the code that prints results reports the error
            return


def _innermost(waits: list[Wait]) -> Wait | None:
    """Return the newest wait of the main thread outside of event loops, else the oldest wait of all."""
    main = [wait for wait in waits if wait.thread == threading.main_thread().ident and wait.loop is None]
    if main:
        return max(main, key=lambda wait: wait.since)
    return min(waits, key=lambda wait: wait.since, default=None)
