"""The waits of this process: every wait has a name, a deadline and a declared end.

    with waiting("reward of group 17", deadline=300, then="the sample fails"):      table.py
        await ...
    value = await within(draw(), "prompts", deadline=60, then="the run stops", error=DataError)    bounded.py
    with published(args, "rank 0"):         watches the table, and publishes it for `slime why`     watchdog.py
    raise_in(thread, Overdue)               an exception in another thread                          bounded.py
    await loop_turn()                       a share of the event loop's time                        pace.py
    with telling_start():                   a line every few seconds until `first_results`          start.py

`waiting` only records a wait. The waiting code enforces the deadline (by a timeout of the call, or `within`), and the
watchdog handles a wait whose own mechanism has failed. This package is a low layer: almost every module may import it.
"""

from slime_core.waits.bounded import Overdue, by_deadline, leave_behind, raise_in, take_late, within
from slime_core.waits.pace import loop_turn
from slime_core.waits.start import first_results, part_of_start, telling_start
from slime_core.waits.table import (
    current,
    gave_up,
    named,
    placed,
    progress,
    report_by,
    user_code_limit,
    waiting,
    when_placed,
)
from slime_core.waits.watchdog import asked_to_end, published

__all__ = [
    "Overdue",
    "asked_to_end",
    "by_deadline",
    "current",
    "first_results",
    "gave_up",
    "leave_behind",
    "loop_turn",
    "named",
    "part_of_start",
    "placed",
    "progress",
    "published",
    "raise_in",
    "report_by",
    "take_late",
    "telling_start",
    "user_code_limit",
    "waiting",
    "when_placed",
    "within",
]
