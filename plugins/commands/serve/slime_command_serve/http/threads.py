"""Work on a client's behalf beside the event loop, with a deadline that ends the work and not only the wait.

The chat template of a model is a program, and tokenising is work in proportion to what a client sent:
`DeadlineThreads.call` runs either on a thread. A thread cannot be killed, but Python code in it can be interrupted,
which is what happens at the deadline: `DeadlinePassed` is raised inside. Code in C is not, and what it may be given is
bounded before it starts (`limits`); a thread that is still in it has its place taken until it returns.
"""

from __future__ import annotations

import asyncio
import ctypes
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from slime_command_serve.http.errors import Refused

T = TypeVar("T")
_THREADS = 4
_DEADLINE_S = 10.0
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

    async def call(self, what: str, work: Callable[[], T]) -> T:
        """What `work` returns or raises; `what` names it in the error. Raises Refused with 503 at the deadline."""
        running: _Work | None = None
        try:
            async with asyncio.timeout(self.deadline):
                await self._places.acquire()
                running = _Work(work, self._places.release)
                result: T = await running.done
                return result
        except TimeoutError:
            raise Refused(503, f"{what} took longer than {self.deadline:g} s and was ended") from None
        finally:
            if running is not None:
                running.interrupt()


class _Work:
    """One call on its thread."""

    def __init__(self, work: Callable[[], Any], ended: Callable[[], None]) -> None:
        self._work, self._ended = work, ended
        self._loop = asyncio.get_running_loop()
        self.done: asyncio.Future[Any] = self._loop.create_future()
        self._lock = threading.Lock()
        self._over = False
        self._thread = threading.Thread(target=self._run, name="slime-front-work", daemon=True)
        self._thread.start()

    def interrupt(self) -> None:
        """End it where it is; nothing where it is over."""
        with self._lock:
            if not self._over:
                ident = ctypes.c_ulong(self._thread.ident or 0)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(DeadlinePassed))

    def _run(self) -> None:
        result, error = None, None
        try:
            try:
                result = self._work()
            finally:
                with self._lock:
                    self._over = True
        except BaseException as raised:  # the boundary between two threads
            error = raised
        with suppress(RuntimeError):  # the loop was closed meanwhile
            self._loop.call_soon_threadsafe(self._tell, result, error)

    def _tell(self, result: Any, error: BaseException | None) -> None:
        self._ended()
        if self.done.done():
            return
        if error is not None:
            self.done.set_exception(error)
        else:
            self.done.set_result(result)
