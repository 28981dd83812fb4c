"""The watchdog: waits that are still there well after their deadline, because what should have ended them did not.

The board calls `watch` with every turn. A wait is reported once; one declared `stop=True` ends the process, since
nothing else can: its thread stands in a call that does not come back.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable

from slime_core.waits.stalls import gave_up
from slime_core.waits.table import Wait

logger = logging.getLogger(__name__)

GRACE = 15.0
"""Seconds that a wait's own mechanism may come late, at least; a tenth of the deadline where that is more."""
STALLED = 75
"""Exit status of a process that the watchdog ended (EX_TEMPFAIL of sysexits.h)."""


def watch(waits: list[Wait], end: Callable[[str], None] | None = None) -> None:
    """Report what is overdue beyond its grace and was not reported; `end(message)` for the first that declares it."""
    for wait in waits:
        if wait.deadline is None or wait.reported or wait.overdue <= max(GRACE, 0.1 * wait.deadline):
            continue
        wait.reported = True
        message = gave_up(wait.what, wait.deadline, f"the deadline itself did not end it; then: {wait.then}")
        logger.warning("%s", message)
        if wait.stop:
            (end or _exit)(message)


def _exit(message: str) -> None:
    """End at once: destructors and exit hooks could wait for what hangs. Children see their parent go."""
    print(f"slime: error: {message}; this process ends with status {STALLED}", file=sys.stderr, flush=True)
    os._exit(STALLED)
