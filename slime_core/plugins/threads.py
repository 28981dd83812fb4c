"""Run plain functions of plugins on threads that can be abandoned.

The standard library's pool waits for its threads when the process ends and when the event loop closes, so a function
that never returns would block the exit. Here threads are daemons, and a new thread replaces the thread of a call whose
deadline has passed; the old thread ends if its function ever returns.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class AbandonableThreadPool(Executor):
    """A pool of at most `max_workers` active threads, started when needed and kept."""

    def __init__(self, max_workers: int, name: str = "plugin") -> None:
        self.max_workers = max_workers
        self._name = name
        self._queue: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._workers = 0
        self._idle = 0
        self._abandoned: set[Future[Any]] = set()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Queue a call."""
        future: Future[T] = Future()
        self._queue.put((future, lambda: fn(*args, **kwargs)))
        self._ensure_workers()
        return future

    async def call(self, fn: Callable[[], T]) -> T:
        """Run `fn` on a thread without blocking the event loop, and return its result; abandon the call on cancel."""
        future = self.submit(fn)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            self.abandon(future)
            raise

    def abandon(self, future: Future[Any]) -> None:
        """Abandon a call: drop it if it is queued, or replace its thread if it is running."""
        if future.cancel():
            return
        with self._lock:
            if future.done():
                return
            self._abandoned.add(future)
            self._workers -= 1
        self._ensure_workers()

    def _ensure_workers(self) -> None:
        with self._lock:
            if self._workers >= self.max_workers or self._idle >= self._queue.qsize():
                return
            self._workers += 1
        threading.Thread(target=self._work, name=self._name, daemon=True).start()

    def _work(self) -> None:
        while True:
            with self._lock:
                self._idle += 1
            future, call = self._queue.get()
            with self._lock:
                self._idle -= 1
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = call()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
            with self._lock:
                if future in self._abandoned:
                    self._abandoned.discard(future)
                    return
            del future, call
