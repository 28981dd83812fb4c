"""Await blocking calls without the event loop's own few threads.

`local.py` starts and ends sandboxes with `on_thread`. asyncio's default pool has only as many threads as processors
plus four, and shares them with other blocking calls (files, retrievers), so sandboxes of hundreds of samples would wait
there while their deadlines run. A thread of `on_thread` ends with its call and is never joined.
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
"""Maximum number of concurrent calls in an event loop: starting a process uses a processor."""
_places: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = weakref.WeakKeyDictionary()


async def on_thread(what: str, call: Callable[[], T], unwanted: Callable[[T], None]) -> asyncio.Future[T]:
    """Wait for a place, and start the call in a new daemon thread; the caller enforces a deadline.

    Args:
        what: Name of the call for the list of waits.
        call: Function that blocks for a while, and ends by itself.
        unwanted: Function that disposes of a result that arrives after the event loop is closed.
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
            with contextlib.suppress(RuntimeError):  # the loop is closed: no caller waits
                loop.call_soon_threadsafe(future.set_exception, problem)
            return
        try:
            loop.call_soon_threadsafe(future.set_result, result)
        except RuntimeError:
            unwanted(result)

    threading.Thread(target=run, name=f"slime: {what}", daemon=True).start()
    return future
