"""Blocking calls beside a simulated event loop: real threads, of which exactly one runs at any moment.

The asynchronous loop calls a rollout stage's blocking methods in threads, and those wait for coroutines in the event
loop. Here the baton goes from hand to hand, so the order of things is the seed's and not the kernel's::

    loop     call(f) --baton--> thread: f() ... run(coroutine) --baton--> loop: turns, runs the coroutine
                                thread: goes on with its result <--baton--  (and ends: the caller of `call` goes on)

`Runner` stands for `asyncio.Runner` and `LoopThread`; `close` leaves the loop alone, which belongs to the simulation.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from slime_core.rollout.event_loop import LoopThread
from tests.simulation.faults import Killed
from tests.simulation.loop import SimulatedLoop

T = TypeVar("T")
_HUNG = 60.0
"""Real seconds a thread may take for one stretch: only a call that really blocks takes longer."""


class _Worker:
    """One blocking call in a thread of its own."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._go, self._parked = threading.Semaphore(0), threading.Semaphore(0)
        self.wants: Coroutine[Any, Any, Any] | None = None
        """What it waits for in the event loop; None once it has ended."""
        self.result: Any = None
        self.error: BaseException | None = None
        self._answer: tuple[Any, BaseException | None] = (None, None)
        self.thread = threading.Thread(target=self._work, daemon=True, name="simulated")

    def step(self, answer: Any = None, error: BaseException | None = None) -> None:
        """Give it the baton, and wait until it waits or has ended."""
        self._answer, self.wants = (answer, error), None
        if self.thread.ident is None:
            self.thread.start()
        else:
            self._go.release()
        if not self._parked.acquire(timeout=_HUNG):
            raise RuntimeError(f"{self._function} blocks a thread for real")

    def wait_for(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """In its thread: hand the baton back until the coroutine has ended."""
        self.wants = coroutine
        self._parked.release()
        self._go.acquire()
        answer, error = self._answer
        if error is not None:
            raise error
        return answer  # type: ignore[no-any-return]

    def _work(self) -> None:
        _here.worker = self
        try:
            self.result = self._function()
        except BaseException as error:
            self.error = error
        self.wants = None
        self._parked.release()


_here = threading.local()


class Threads:
    """The threads of one simulated process."""

    def __init__(self, loop: SimulatedLoop) -> None:
        self._loop = loop
        self._waiting: list[_Worker] = []

    async def call(self, function: Callable[[], T]) -> T:
        """What `function` returns; cancelling leaves it to its end."""
        ended: asyncio.Future[T] = self._loop.create_future()
        self._step(_Worker(function), ended)
        return await ended

    def _step(self, worker: _Worker, ended: asyncio.Future[Any], answer: Any = None, error: Any = None) -> None:
        worker.step(answer, error)
        if worker.wants is not None:
            self._waiting.append(worker)
            task = self._loop.create_task(worker.wants)
            task.add_done_callback(lambda task: self._answered(worker, ended, task))
        elif isinstance(worker.error, Killed):
            self._loop.kill(worker.error)
        elif not ended.done():
            if worker.error is None:
                ended.set_result(worker.result)
            else:
                ended.set_exception(worker.error)

    def _answered(self, worker: _Worker, ended: asyncio.Future[Any], task: asyncio.Task[Any]) -> None:
        self._waiting.remove(worker)
        if task.cancelled():
            self._step(worker, ended, error=asyncio.CancelledError())
        else:
            error = task.exception()
            self._step(worker, ended, None if error else task.result(), error)

    def discard(self) -> None:
        """End the threads of a process that is gone."""
        for worker in self._waiting:
            worker.step(error=Killed("the process is gone"))
            for _ in range(10):  # some clean up, which a dead process does not
                if worker.wants is None:
                    break
                worker.wants.close()
                worker.step(error=Killed("the process is gone"))
        self._waiting.clear()


class Runner(LoopThread):
    """Runs coroutines in the simulated loop for whoever blocks, and for who is in it, and blocking calls beside it."""

    in_real_time = False

    def __init__(self, loop: SimulatedLoop, threads: Threads) -> None:
        super().__init__("simulated")
        self._simulated, self._threads = loop, threads

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """What the coroutine returns."""
        worker: _Worker | None = getattr(_here, "worker", None)
        return self._simulated.run(coroutine) if worker is None else worker.wait_for(coroutine)

    async def in_thread(self, call: Callable[..., T], *args: Any) -> T:
        """What `call` returns."""
        return await self._threads.call(lambda: call(*args))

    def close(self) -> None:
        """The loop is the simulation's."""
