"""`slime.utils.async_utils.run`: run a coroutine from a plain function, in a loop on a separate thread.

Rollout functions of THUDM/slime are plain functions that call `run`. There is one loop for the whole process, so
objects that a coroutine binds to its loop (semaphores, connections) live from rollout to rollout. It is not the
engine's loop, which runs on the main thread while a plain rollout function runs on another thread.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from slime import _missing

T = TypeVar("T")

_STOP_DEADLINE = 5.0
"""Seconds for open connections to close when the process ends."""


class AsyncLoopThread:
    """An event loop on a daemon thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._turn, name="slime-compat-loop", daemon=True)
        self._thread.start()

    def _turn(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def run(self, coro: Coroutine[Any, Any, T]) -> T:
        """Run the coroutine and return its result, or raise its error; it should have deadlines of its own.

        Raises:
            RuntimeError: Called on the loop's own thread, which would wait for itself; `await` the coroutine there.
        """
        if threading.current_thread() is self._thread:
            coro.close()
            raise RuntimeError("run() was called inside a coroutine that run() runs; await the coroutine instead")
        return asyncio.run_coroutine_threadsafe(coro, self.loop).result()

    def stop(self) -> None:
        """Close connections, then the loop; safe to call twice."""
        if self.loop.is_closed() or not self._thread.is_alive():
            return
        closing = asyncio.run_coroutine_threadsafe(self.loop.shutdown_asyncgens(), self.loop)
        closing.result(_STOP_DEADLINE)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(_STOP_DEADLINE)
        if not self._thread.is_alive():
            self.loop.close()


_loop: AsyncLoopThread | None = None
_lock = threading.Lock()


def get_async_loop() -> AsyncLoopThread:
    """Return the process's loop, started by the first call."""
    global _loop
    with _lock:
        if _loop is None:
            _loop = AsyncLoopThread()
            atexit.register(_loop.stop)
        return _loop


def run(coro: Coroutine[Any, Any, T]) -> T:
    """Return the coroutine's result (see `AsyncLoopThread.run`)."""
    return get_async_loop().run(coro)


__all__ = ["AsyncLoopThread", "get_async_loop", "run"]
__getattr__ = _missing.names(__name__)
