"""Calls that block, awaited without the event loop's own few threads.

`local.py` starts and ends sandboxes with it. asyncio's default threads are as many as the processors and four, and
shared with whatever else blocks (files, retrievers), so sandboxes of hundreds of samples would stand in line there with
their deadlines running. A thread of `on_thread` ends with its call, and nobody joins it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import weakref
from collections.abc import Callable
from typing import TypeVar

from slime_core.waits import waiting

T = TypeVar("T")

STARTS = max(4, 2 * (os.cpu_count() or 1))
"""Calls at a time, in one event loop: starting a process is work for the processors."""
_places: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = weakref.WeakKeyDictionary()


async def on_thread(what: str, call: Callable[[], T], unwanted: Callable[[T], None]) -> asyncio.Future[T]:
    """Wait for a place, and begin the call in a daemon thread of its own; its deadline is the caller's.

    Args:
        what: Of the call, for the list of waits.
        call: Blocks for a while, and ends by itself.
        unwanted: Takes a result that comes when the event loop is gone.
    """
    loop = asyncio.get_running_loop()
    place = _places.setdefault(loop, asyncio.Semaphore(STARTS))
    with waiting(f"a turn for {what}", deadline=None, then="those before it have deadlines"):
        await place.acquire()
    future: asyncio.Future[T] = loop.create_future()
    future.add_done_callback(lambda _: place.release())

    def run() -> None:
        try:
            result = call()
        except BaseException as error:
            problem = error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}")
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(future.set_exception, problem)
            return
        try:
            loop.call_soon_threadsafe(future.set_result, result)
        except RuntimeError:
            unwanted(result)

    threading.Thread(target=run, name=f"slime: {what}", daemon=True).start()
    return future
