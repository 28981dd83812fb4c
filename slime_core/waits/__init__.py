"""The waits of this process: every wait has a name, a deadline and a declared end.

    with waiting("reward of group 17", deadline=300, then="the sample fails"):      table.py
        await ...
    value = await within(draw(), "prompts", deadline=60, then="the run stops", error=DataError)    bounded.py
    start_board(run_dir, "rank 0")          publishes the table below RUN_DIR/waits for `slime why`      board.py
    await loop_turn()                       a share of the event loop's time                        pace.py
    with telling_start():                   a line every few seconds until `first_results`          start.py

`waiting` only records a wait. The waiting code enforces the deadline (by a timeout of the call, `within` or
`call_within`), and the board's watchdog (`watchdog.py`) handles a wait whose own mechanism has failed. This package
needs the standard library only and is the lowest layer: every module may import it.
"""

from slime_core.waits.board import Board, published, remove_board, start_board, stop_board
from slime_core.waits.bounded import Overdue, by_deadline, call_within, leave_behind, within
from slime_core.waits.pace import loop_turn
from slime_core.waits.stalls import gave_up, stall_report
from slime_core.waits.start import first_results, part_of_start, telling_start
from slime_core.waits.table import (
    Wait,
    current,
    limit_user_code,
    named,
    placed,
    progress,
    user_code_limit,
    waiting,
    when_placed,
)
from slime_core.waits.watchdog import asked_to_end

__all__ = [
    "Board",
    "Overdue",
    "Wait",
    "asked_to_end",
    "by_deadline",
    "call_within",
    "current",
    "first_results",
    "gave_up",
    "leave_behind",
    "limit_user_code",
    "loop_turn",
    "named",
    "part_of_start",
    "placed",
    "progress",
    "published",
    "remove_board",
    "stall_report",
    "start_board",
    "stop_board",
    "telling_start",
    "user_code_limit",
    "waiting",
    "when_placed",
    "within",
]
