"""The watchdog: a thread checks deadlines and event loops twice a second, and ends the process if necessary.

    a wait is well past its deadline             report it; end the process with status 75 if the wait has `stop=True`
    an event loop does not turn                  name the user's function that blocks it
    ... and the process was asked to end         end the process, since the loop cannot

The watchdog never ends a single wait. An event loop that stands still enforces none of its deadlines, so a wait that
the run depends on declares `stop=True`. Boards publish the waits for other processes (`slime why`). A board is a
function (run_dir, role) in the entry-point group `slime.boards` that returns a context manager.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import weakref
from asyncio import AbstractEventLoop
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from slime_core.distributions import entry_points
from slime_core.waits.table import Wait, current, gave_up, limit_user_code

if TYPE_CHECKING:
    from slime_core.protocols import Args

logger = logging.getLogger(__name__)

THREAD = "slime: watchdog"
"""Name of the watchdog's thread."""
TICK = 0.5
"""Seconds between two checks."""
GRACE = 15.0
"""Minimum seconds by which a wait's own deadline may be late; a tenth of the deadline if that is longer."""
BUSY = 1.0
"""Seconds without a turn of the event loop before a warning."""
_STALLED = 75
"""Exit status of a process that the watchdog ended (EX_TEMPFAIL of sysexits.h)."""
_BOUNDARY = "slime_core.workers.call"
"""Module whose functions call user code and hold its name in the variable `label`."""
_turns: weakref.WeakKeyDictionary[AbstractEventLoop, _Turn] = weakref.WeakKeyDictionary()
_named: set[str] = set()
_asked: int | None = None
_at_once = False


@contextmanager
def published(args: Args, role: str) -> Iterator[None]:
    """Watch this process's waits until the end of the block, and publish them as `role` ("rank 0") by every board."""
    assert args.run_dir is not None, "every command that runs has one"
    asked_to_end(None)
    limit_user_code(args.user_code_timeout)
    end = threading.Event()
    threading.Thread(target=_run, args=(end,), name=THREAD, daemon=True).start()
    try:
        with ExitStack() as boards:
            for _, entry, _ in entry_points("slime.boards"):
                boards.enter_context(entry.load()(Path(args.run_dir), role))
            yield
    finally:
        end.set()
        limit_user_code(None)


def _run(end: threading.Event) -> None:
    while not end.wait(TICK):
        look()


class _Turn:
    """A request to an event loop for a turn."""

    def __init__(self) -> None:
        self.since = time.monotonic()
        self.had = False
        self.told = False
        """True once an overdue wait of the blocked loop was reported."""

    def take(self) -> None:
        """Record that the loop has turned; called in the loop."""
        self.had = True


def look() -> None:
    """Check all waits once: report problems, and end the process if necessary."""
    waits = current()
    for loop, wait in {wait.loop: wait for wait in waits if wait.loop is not None}.items():
        busy = _busy(loop)
        if busy > BUSY:
            _name(wait.thread, busy)
        if busy > GRACE and _asked is not None:
            label, where = _culprit(wait.thread)
            if label or _at_once:
                _exit(f"asked to end, which the event loop cannot: {where} keeps it", _asked)
    watch(waits, _exit)


def watch(waits: list[Wait], end: Callable[[str, int], None]) -> None:
    """Report new waits that are overdue beyond their grace; call `end` for the first with `stop=True`.

    A wait with `stop=True` ends the process, because its thread is in a call that does not return. All waits of an
    event loop that stands still are reported together, once per standstill.
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
            end(message, _STALLED)


def asked_to_end(status: int | None, *, at_once: bool = False) -> None:
    """Record that a signal asked the process to end; None resets it for a new run.

    If an event loop stands still, the process ends with exit status `status`: after `GRACE` seconds if a user's
    function blocks the loop, or, with `at_once`, if any other code does. Takes no lock.
    """
    global _asked, _at_once
    _asked, _at_once = status, at_once


def _busy(loop: AbstractEventLoop) -> float:
    """Return the seconds for which a requested turn of the loop has been pending; 0 if none is pending."""
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
    """Warn once per user function that blocks the loop; skip other code, since an engine may compute in the loop."""
    label, where = _culprit(thread)
    if label and label not in _named:
        _named.add(label)
        logger.warning(
            "%s has kept the event loop busy for %.1f s without awaiting; every other sample waits for it, and no"
            " deadline can end it. Make it a plain function, or declare RewardTraits(execution='process') on it",
            where, busy,
        )  # fmt: skip


def _culprit(thread: int) -> tuple[str, str]:
    """Return the user component that a thread runs, or "", and its current function and line."""
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
    """End the process at once: destructors and exit hooks could wait for the hanging call. Guards end the children."""
    print(f"slime: error: {message}; this process ends with status {status}", file=sys.stderr, flush=True)
    os._exit(status)
