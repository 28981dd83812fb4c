"""Stacks of all threads and asyncio tasks of this process, as text: for `slime why --stacks` and stall reports.

`Task.get_stack` stops at a suspended task's outermost coroutine, so the chain of awaited coroutines is followed here;
and tasks are only found through the loops of named waits.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Iterable
from types import FrameType
from typing import Any

from slime_core.waits.watchdog import THREAD

BOARD = "slime: board"
"""Name of the thread that publishes waits."""
_MOST_TASKS = 50
_DEEPEST = 60


def stacks(loops: Iterable[asyncio.AbstractEventLoop]) -> str:
    """Return the stacks of all threads, the main one first, then of the tasks of `loops`; equal ones once, counted.

    The threads of the board and of the watchdog are left out.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] != threading.main_thread().ident)
    for ident, frame in frames:
        if names.get(ident) in (BOARD, THREAD):
            continue
        parts.append(f"thread {names.get(ident, ident)}\n{''.join(traceback.format_stack(frame)[-_DEEPEST:])}")
    for loop in set(loops):
        parts += _tasks(loop)
    return "\n".join(parts)


def _tasks(loop: asyncio.AbstractEventLoop) -> list[str]:
    try:
        tasks = sorted(asyncio.all_tasks(loop), key=lambda task: task.get_name())
    except RuntimeError:  # asyncio's set of tasks kept changing while it was copied, many times in a row
        return ["tasks: too busy to be listed\n"]
    found: dict[str, list[str]] = {}
    for task in tasks:
        found.setdefault("".join(_lines(task.get_coro())), []).append(task.get_name())
    parts = []
    for text, names in sorted(found.items(), key=lambda item: -len(item[1]))[:_MOST_TASKS]:
        others = f" and {len(names) - 1} more at the same place" if len(names) > 1 else ""
        parts.append(f"task {names[0]}{others}\n{text or '  (running)' + chr(10)}")
    if len(found) > _MOST_TASKS:
        kinds = Counter(len(names) for names in list(found.values())[_MOST_TASKS:])
        parts.append(f"{sum(number * count for number, count in kinds.items())} tasks at other places left off\n")
    return parts


def _lines(coroutine: Any) -> list[str]:
    """Return the lines of a suspended coroutine and of the coroutines that it awaits."""
    lines: list[str] = []
    while coroutine is not None and len(lines) < _DEEPEST:
        frame: FrameType | None = None
        following = None
        for prefix, link in (("cr", "cr_await"), ("gi", "gi_yieldfrom"), ("ag", "ag_await")):
            if hasattr(coroutine, f"{prefix}_frame"):
                frame, following = getattr(coroutine, f"{prefix}_frame"), getattr(coroutine, link, None)
                break
        if frame is None:
            lines.append(f"  waits for {_short(coroutine)}\n")
            break
        lines += traceback.format_list(traceback.StackSummary.extract(iter([(frame, frame.f_lineno)])))
        coroutine = following
    return lines


def _short(awaitable: Any) -> str:
    name = type(awaitable).__name__
    return "a future" if name in ("FutureIter", "Future", "_asyncio.FutureIter") else name
