"""What a deadline cannot do where it is kept: the board's thread looks twice a second, and ends the process if need be.

    a wait is there well after its deadline      reported; the process ends with 75 where the wait says `stop=True`
    an event loop does not turn                  the user's function that keeps it is named
    ... and the process was asked to end         it ends, since the loop cannot see to that

Nothing here ends a wait. A loop that stands still keeps none of its deadlines, which is
why a wait on which the run depends declares `stop=True`.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import weakref
from asyncio import AbstractEventLoop
from collections.abc import Callable

from slime_core.waits.stalls import gave_up
from slime_core.waits.table import Wait

logger = logging.getLogger(__name__)

GRACE = 15.0
"""Seconds that a wait's own mechanism may come late, at least; a tenth of the deadline where that is more."""
BUSY = 1.0
"""Seconds without a turn of the event loop that are worth a warning."""
STALLED = 75
"""Exit status of a process that the watchdog ended (EX_TEMPFAIL of sysexits.h)."""
_BOUNDARY = "slime_core.plugins.boundary"
"""Its functions call a user's code, and have its name in `label`."""
_turns: weakref.WeakKeyDictionary[AbstractEventLoop, _Turn] = weakref.WeakKeyDictionary()
_named: set[str] = set()
_asked: int | None = None
_at_once = False


class _Turn:
    """One request to an event loop for a turn."""

    def __init__(self) -> None:
        self.since = time.monotonic()
        self.had = False
        self.told = False
        """That it is not had, of a wait that is overdue."""

    def take(self) -> None:
        """In the loop."""
        self.had = True


def look(waits: list[Wait], end: Callable[[str, int], None] | None = None) -> None:
    """Once over all waits: report, and call `end(message, exit status)` in place of ending the process."""
    end = end or _exit
    for loop, wait in {wait.loop: wait for wait in waits if wait.loop is not None}.items():
        busy = _busy(loop)
        if busy > BUSY:
            _name(wait.thread, busy)
        if busy > GRACE and _asked is not None:
            label, where = _culprit(wait.thread)
            if label or _at_once:
                end(f"asked to end, which the event loop cannot: {where} keeps it", _asked)
    watch(waits, end)


def watch(waits: list[Wait], end: Callable[[str, int], None]) -> None:
    """Report what is overdue beyond its grace and was not reported; end for the first that declares it.

    One declared `stop=True` ends the process, since nothing else can: its thread is in a call that does not return.
    What waits in an event loop that stands still is reported together, once for as long as that lasts.
    """
    still: dict[_Turn | Wait, list[Wait]] = {}
    for wait in waits:
        if wait.deadline is None or wait.reported or wait.overdue <= max(GRACE, 0.1 * wait.deadline):
            continue
        wait.reported = True
        kept = wait.loop is not None and _busy(wait.loop) > min(BUSY, GRACE)
        still.setdefault(_turns[wait.loop] if kept and wait.loop is not None else wait, []).append(wait)
    for turn, together in still.items():
        ends = [wait for wait in together if wait.stop]
        wait, keeper = [*ends, *together][0], ""
        if isinstance(turn, _Turn):
            if turn.told and not ends:
                continue
            turn.told = True
            others = f" of {len(together) - 1} other waits, too" if len(together) > 1 else ""
            keeper = f"; {_culprit(wait.thread)[1]} keeps the event loop{others}"
        message = gave_up(wait.what, wait.deadline, f"the deadline itself did not end it; then: {wait.then}{keeper}")
        logger.warning("%s", message)
        if ends:
            end(message, STALLED)


def asked_to_end(status: int | None, *, at_once: bool = False) -> None:
    """A signal asks for the end, with that exit status where an event loop stands still; None: of a new run, nobody.

    A user's function that keeps the loop gets `GRACE`, what else computes in it only `at_once`. Takes no lock.
    """
    global _asked, _at_once
    _asked, _at_once = status, at_once


def _busy(loop: AbstractEventLoop) -> float:
    """Seconds for which the loop has not turned though asked to, as far as is known."""
    turn = _turns.get(loop)
    if turn is not None and not turn.had and loop.is_running():
        return time.monotonic() - turn.since
    turn = _turns[loop] = _Turn()
    try:
        loop.call_soon_threadsafe(turn.take)
    except RuntimeError:  # it is closed
        turn.had = True
    return 0.0


def _name(thread: int, busy: float) -> None:
    """Say once for each function of a user's that it keeps the loop; an engine of this process may compute in it."""
    label, where = _culprit(thread)
    if label and label not in _named:
        _named.add(label)
        logger.warning(
            "%s has kept the event loop busy for %.1f s without awaiting; every other sample waits for it, and no"
            " deadline can end it. Make it a plain function, or declare RewardTraits(execution='process') on it",
            where, busy,
        )  # fmt: skip


def _culprit(thread: int) -> tuple[str, str]:
    """The user's component that a thread is in, if any, and the function and line where it is."""
    frame = innermost = sys._current_frames().get(thread)
    if frame is None or innermost is None:
        return "", "a thread that has ended"
    called, label = frame, ""
    while frame is not None and not label and frame.f_globals.get("__name__", "").partition(".")[0] != "asyncio":
        if frame.f_globals.get("__name__") == _BOUNDARY:
            label = str(frame.f_locals.get("label", ""))
        else:
            called = frame
        frame = frame.f_back
    place = f"{called.f_code.co_name} (now at {innermost.f_code.co_filename}:{innermost.f_lineno})"
    return label, f"{label}, {place}" if label else place


def _exit(message: str, status: int) -> None:
    """End at once: destructors and exit hooks could wait for what hangs. Guards end the children."""
    print(f"slime: error: {message}; this process ends with status {status}", file=sys.stderr, flush=True)
    os._exit(status)
