"""One thread for everything that the trainer does in an asynchronous run: training, weight updates, checkpoints.

`inline_async` awaits its calls. Collective calls of several trainer processes must come in one order, and one thread
has one; for the same reason the thread itself says to the other processes that this one is at work, while it has
nothing to do. What a reader would get wrong: a call cannot be interrupted. `close` waits for the one that runs, up to
a deadline, and then leaves its thread to end with the process.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from slime_core.errors import RolloutError
from slime_core.waits import waiting

T = TypeVar("T")
logger = logging.getLogger(__name__)

CLOSE_DEADLINE = 30.0
"""Seconds that the call that runs gets to end."""


class TrainerThread:
    """Calls in the order in which they come.

    Args:
        idle: Called in the thread every `period` seconds in which there is nothing to do.
        period: In seconds; None: `idle` is never called.
    """

    def __init__(self, idle: Callable[[], None] | None = None, period: float | None = None) -> None:
        self._idle = idle
        self._period = period if idle is not None else None
        self._queue: queue.Queue[tuple[Future[Any], Callable[[], Any]] | None] = queue.Queue()
        self._problem: Exception | None = None
        """What `idle` raised; nothing is called after that."""
        self.failed = False
        """A call has raised, or may not have ended: other processes may be in the middle of it."""
        self._device = _current_device()
        self._thread = threading.Thread(target=self._work, name="slime-trainer", daemon=True)
        self._thread.start()

    async def call(self, what: str, fn: Callable[[], T]) -> T:
        """What `fn` returns in the thread.

        Raises:
            RolloutError: The other processes could not be told that this one is at work.
        """
        future: Future[T] = Future()
        self._queue.put((future, fn))
        with waiting(what, deadline=None, then="its own deadline: --train-timeout, --weight-push-timeout, ..."):
            return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Drop what is queued, wait for the call that runs and end the thread; safe to call twice."""
        self._queue.put(None)
        self._thread.join(CLOSE_DEADLINE)
        if self._thread.is_alive():
            self.failed = True
            logger.warning("the trainer's call did not end within %.0f s; left alone", CLOSE_DEADLINE)

    def _work(self) -> None:
        _use_device(self._device)
        while (item := self._next()) is not None:
            future, fn = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                if self._problem is not None:
                    raise RolloutError(f"another training process has ended, or hangs: {self._problem}")
                result = fn()
            except BaseException as error:
                self.failed = True
                future.set_exception(error)
            else:
                future.set_result(result)
            del item, future, fn

    def _next(self) -> tuple[Future[Any], Callable[[], Any]] | None:
        """The next call; None: the thread is to end."""
        while True:
            try:
                return self._queue.get(timeout=self._period if self._problem is None else None)
            except queue.Empty:
                assert self._idle is not None
                try:
                    self._idle()
                except Exception as error:
                    self._problem = error


def _current_device() -> int | None:
    """CUDA's device in this thread, if a trainer uses one: another thread would begin with device 0."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None
    return int(torch.cuda.current_device())


def _use_device(device: int | None) -> None:
    if device is not None:
        sys.modules["torch"].cuda.set_device(device)
