"""Work on a client's behalf beside the event loop, with a deadline that ends the work and not only the wait.

The chat template of a model is a program, and tokenising is work in proportion to what a client sent:
`DeadlineThreads.call` runs either on a thread. A thread cannot be killed, but Python code in it can be interrupted,
which is what happens at the deadline: `DeadlinePassed` is raised inside. Code in C is not, and what it may be given is
bounded before it starts (`limits`); a thread that is still in it has its place taken until it returns.
"""

from __future__ import annotations

import asyncio
import ctypes
import queue
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from slime_command_serve.http.errors import Refused

T = TypeVar("T")
_THREADS = 4
_DEADLINE_S = 10.0
_IDLE_S = 5.0
"""That a thread waits for another call: starting one holds the event loop up until the system has it run."""
_SWITCH_S = 0.0005


class DeadlinePassed(BaseException):
    """Raised inside the work; nothing that the work calls is to catch it."""


class DeadlineThreads:
    """At most `_THREADS` calls at a time, for one event loop."""

    def __init__(self, deadline: float = _DEADLINE_S) -> None:
        """`deadline`: seconds of a call, waiting for a place included."""
        # The engine gives the interpreter's lock away in every operation and waits an interval to have it back from a
        # template in Python: at CPython's 5 ms one client's loop made the requests of all others 150 times slower.
        sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_S))
        self.deadline = deadline
        self._places = asyncio.Semaphore(_THREADS)
        self._next: queue.SimpleQueue[_Work] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0
        """Threads that wait, beyond the calls in `_next`."""

    async def call(self, what: str, work: Callable[[], T]) -> T:
        """What `work` returns or raises; `what` names it in the error. Raises Refused with 503 at the deadline."""
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
        """None: none came, and the thread is not waited for any more."""
        while True:
            with suppress(queue.Empty):
                return self._next.get(timeout=_IDLE_S)
            with self._lock:
                if self._next.empty():
                    self._idle -= 1
                    return None


class _Work:
    """One call, for a thread."""

    def __init__(self, work: Callable[[], Any], ended: Callable[[], None]) -> None:
        self._work, self._ended = work, ended
        self._loop = asyncio.get_running_loop()
        self.done: asyncio.Future[Any] = self._loop.create_future()
        self._lock = threading.Lock()
        self._thread: int | None = None
        self._over = self._interrupted = False

    def interrupt(self) -> None:
        """End it where it is; nothing where it is over."""
        with self._lock:
            self._interrupted = not self._over
            if self._interrupted and self._thread is not None:
                ident = ctypes.c_ulong(self._thread)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(DeadlinePassed))

    def run(self) -> bool:
        """On the thread. False where it was interrupted: the exception may be late, and must not meet another call."""
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
