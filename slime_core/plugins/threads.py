"""Runs plain functions of plugins on threads that can be given up.

The standard library's pool waits for its threads when the process ends and when the event loop closes, so one
function that never returns would hold up the exit for ever. Here threads are daemons, and a call whose deadline has
passed gives its place to a new thread; the old one ends by itself if its function ever returns.
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
    """At most `max_workers` threads at work, started when needed and kept."""

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
        """What `fn` returns on one of the threads, while the event loop turns; a cancelled call is given up."""
        future = self.submit(fn)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            self.abandon(future)
            raise

    def abandon(self, future: Future[Any]) -> None:
        """Nobody waits for this call any more: drop it when queued, replace its thread when it runs."""
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
