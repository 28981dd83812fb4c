"""Run work for clients on threads outside the event loop, with a deadline that ends the work and not only the wait.

A chat template is a program, and the time to tokenise grows with the client's input. `DeadlineThreads.call` runs both
on a thread. A thread cannot be killed, but its Python code can be interrupted: at the deadline `DeadlinePassed` is
raised inside the thread. C code cannot be interrupted, so its input is limited before it starts (`limits`). A thread
that is still in C code occupies its place until it returns.
"""

from __future__ import annotations

import asyncio
import queue
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from slime_core.waits import raise_in, take_late
from slime_serving.http.errors import Refused

T = TypeVar("T")
_THREADS = 4
_DEADLINE_S = 10.0
_IDLE_S = 5.0
"""Seconds that an idle thread waits for another call: starting a thread blocks the event loop until it runs."""
_SWITCH_S = 0.0005


class DeadlinePassed(BaseException):
    """Raised inside the work at the deadline; a BaseException, so that the work's own handlers do not catch it."""


class DeadlineThreads:
    """Threads of one event loop that run at most `_THREADS` calls at a time."""

    def __init__(self, deadline: float = _DEADLINE_S) -> None:
        """Set the deadline of a call in seconds, including its wait for a place."""
        # The engine releases the interpreter's lock in every operation and waits a switch interval to get it back from
        # a template in Python. With CPython's 5 ms, one client's loop made all other requests 150 times slower.
        sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_S))
        self.deadline = deadline
        self._places = asyncio.Semaphore(_THREADS)
        self._next: queue.SimpleQueue[_Work] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0
        """Number of idle threads, minus the calls in `_next`."""

    async def call(self, what: str, work: Callable[[], T]) -> T:
        """Run `work` and return its result; `what` names it in errors. Raises Refused with 503 at the deadline."""
        running: _Work | None = None
        try:
            async with asyncio.timeout(self.deadline):
                await self._places.acquire()
                running = _Work(work, self._places.release)
                self._begin(running)
                result: T = await running.done
                return result
        except TimeoutError:
            raise Refused(503, f"{what} took longer than {self.deadline:g} s and was ended") from None
        finally:
            if running is not None:
                running.interrupt()

    def _begin(self, work: _Work) -> None:
        with self._lock:
            if self._idle:
                self._idle -= 1
                self._next.put(work)
                return
        threading.Thread(target=self._serve, args=(work,), name="slime-front-work", daemon=True).start()

    def _serve(self, work: _Work) -> None:
        following: _Work | None = work
        while following is not None and following.run():
            with self._lock:
                self._idle += 1
            following = self._following()

    def _following(self) -> _Work | None:
        """Return the next call, or None if none came and the thread may end."""
        while True:
            with suppress(queue.Empty):
                return self._next.get(timeout=_IDLE_S)
            with self._lock:
                if self._next.empty():
                    self._idle -= 1
                    return None


class _Work:
    """A call to run on a thread."""

    def __init__(self, work: Callable[[], Any], ended: Callable[[], None]) -> None:
        self._work, self._ended = work, ended
        self._loop = asyncio.get_running_loop()
        self.done: asyncio.Future[Any] = self._loop.create_future()
        self._lock = threading.Lock()
        self._thread: int | None = None
        self._over = self._interrupted = False

    def interrupt(self) -> None:
        """Interrupt the call if it has not ended."""
        with self._lock:
            self._interrupted = not self._over
            if self._interrupted and self._thread is not None:
                raise_in(self._thread, DeadlinePassed)

    def run(self) -> bool:
        """Run the call, on the thread. Returns False if it was interrupted."""
        result, error = None, None
        try:
            with self._lock:
                self._thread, begins = threading.get_ident(), not self._interrupted
            try:
                result = self._work() if begins else None
            finally:
                with self._lock:
                    self._over = True
        except BaseException as raised:  # the boundary between two threads
            error = raised
        if self._interrupted and not isinstance(error, DeadlinePassed):
            take_late(DeadlinePassed)
        with suppress(RuntimeError):  # the loop was closed meanwhile
            self._loop.call_soon_threadsafe(self._tell, result, error)
        return not self._interrupted

    def _tell(self, result: Any, error: BaseException | None) -> None:
        self._ended()
        if self.done.done():
            return
        if error is not None:
            self.done.set_exception(error)
        else:
            self.done.set_result(result)
