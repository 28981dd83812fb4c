"""Places where an environment runs, and the effect of a deadline in each place.

    LoopPlace      coroutines, in the event loop                   at a deadline: cancelled
    ThreadPlace    plain methods, in a daemon thread of its own    at a deadline: left behind; it closes the
                                                                   environment and ends once its call returns
    ProcessPlace   anything, in a process of its own               at a deadline: killed, with all it started

`EnvironmentSession` has one place per environment and enforces the deadlines. An event loop has at most
`--environment-threads` threads, abandoned threads included, so hanging environments reduce the places for others but do
not take more memory. `abandon` never waits; no method of the place may be called after it.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import pickle
import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

from slime_rewards.processes.messages import apply, pack_args, sample_state
from slime_rewards.processes.worker import HEADER, Worker

from slime_core.errors import PluginError, SlimeError
from slime_core.plugins.registry import Resolved
from slime_core.plugins.signatures import construct
from slime_core.protocols import Args
from slime_core.sample import Sample
from slime_core.waits import waiting

logger = logging.getLogger(__name__)

END_DEADLINE = 10.0
"""Seconds that closing an abandoned environment may take."""


class Place(Protocol):
    """The place where an environment runs. Calls are made one at a time."""

    async def build(self) -> None:
        """Construct the environment. Raises the constructor's error."""

    async def call(self, method: str, *args: Any, **keywords: Any) -> Any:
        """Call a method. Raises the method's error."""

    async def end(self) -> None:
        """Free the place after the environment has been closed."""

    def abandon(self) -> None:
        """Give up an overdue or unneeded environment; close it in its place if possible."""


class LoopPlace:
    """An environment whose methods are coroutines."""

    def __init__(self, found: Resolved, args: Args) -> None:
        self._found, self._args = found, args
        self._environment: Any = None

    async def build(self) -> None:
        """Construct the environment."""
        self._environment = construct(self._found.obj, self._args)

    async def call(self, method: str, *args: Any, **keywords: Any) -> Any:
        """Call a method and await its result."""
        answer = getattr(self._environment, method)(*args, **keywords)
        return await _answered(answer) if inspect.isawaitable(answer) else answer

    async def end(self) -> None:
        """Do nothing: this place holds no resources."""

    def abandon(self) -> None:
        """Start a task that closes the environment, whose call was cancelled."""
        if hasattr(self._environment, "close"):
            task = asyncio.get_running_loop().create_task(self._close(), name="slime: close an environment")
            _CLOSING.add(task)
            task.add_done_callback(_CLOSING.discard)

    async def _close(self) -> None:
        try:
            async with asyncio.timeout(END_DEADLINE):
                await self.call("close")
        except Exception as error:  # no caller waits for the task, and the sample has failed for another reason
            logger.warning("%s: close: %s: %s", self._found.ref.label, type(error).__name__, error)


_CLOSING: set[asyncio.Task[None]] = set()


async def _answered(answer: Any) -> Any:
    return await answer  # the session keeps the deadline


class ThreadPlace:
    """An environment with plain methods, all called in one thread, its constructor too."""

    def __init__(self, found: Resolved, args: Args) -> None:
        self._found, self._args = found, args
        self._environment: Any = None
        self._queue: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._abandoned = False
        self._thread: threading.Thread | None = None

    async def build(self) -> None:
        """Wait for a free place, start the thread, and construct the environment in it."""
        release = await THREADS.take(self._args.environment_threads, self._found.ref.label)
        self._thread = threading.Thread(
            target=self._work, args=(release,), name=f"slime: {self._found.ref.label}", daemon=True
        )
        self._thread.start()

        def made() -> None:
            self._environment = construct(self._found.obj, self._args)

        await self._in_thread(made)

    async def call(self, method: str, *args: Any, **keywords: Any) -> Any:
        """Call a method in the thread; if it returns a coroutine, await the coroutine here."""
        answer = await self._in_thread(lambda: getattr(self._environment, method)(*args, **keywords))
        return await _answered(answer) if inspect.isawaitable(answer) else answer

    async def end(self) -> None:
        """End the thread."""
        self._queue.put(None)

    def abandon(self) -> None:
        """Let the thread close the environment and end once its call returns."""
        if self._thread is None:
            return
        self._abandoned = True
        THREADS.left_behind.add(self._thread)
        self._queue.put(None)

    async def _in_thread(self, call: Callable[[], Any]) -> Any:
        future: Future[Any] = Future()
        self._queue.put((future, call))
        return await asyncio.wrap_future(future)

    def _work(self, release: Callable[[], None]) -> None:
        while (item := self._queue.get()) is not None:
            future, call = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except BaseException as error:  # the caller handles every error
                future.set_exception(error)
        if self._abandoned and self._environment is not None:
            try:
                answer = self._environment.close() if hasattr(self._environment, "close") else None
                if inspect.isawaitable(answer):
                    asyncio.run(_answered(answer))
            except Exception as error:
                logger.warning("%s: close: %s: %s", self._found.ref.label, type(error).__name__, error)
        THREADS.left_behind.discard(threading.current_thread())
        release()


class ThreadPlaces:
    """A limit of threads with environments in each event loop."""

    def __init__(self) -> None:
        self._of_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]
        self._of_loop = weakref.WeakKeyDictionary()
        self.left_behind: set[threading.Thread] = set()
        """Threads whose call was abandoned and has not returned."""

    async def take(self, count: int, label: str) -> Callable[[], None]:
        """Wait for one of `count` places, and return a function that frees the place.

        The first caller's `count` applies to an event loop. There is no deadline here: the samples that hold places
        have deadlines, and so has the waiting sample.
        """
        loop = asyncio.get_running_loop()
        if loop not in self._of_loop:
            self._of_loop[loop] = asyncio.Semaphore(count)
        semaphore = self._of_loop[loop]
        then = f"--rollout-timeout; {len(self.left_behind)} hang, more places: --environment-threads"
        with waiting(f"a thread for {label}", deadline=None, then=then):
            await semaphore.acquire()

        def release() -> None:
            with contextlib.suppress(RuntimeError):  # the event loop has ended, and its semaphore with it
                loop.call_soon_threadsafe(semaphore.release)

        return release


THREADS = ThreadPlaces()
"""Thread places of this process."""


class ProcessPlace:
    """An environment in its own process, which ends with this process."""

    def __init__(self, found: Resolved, args: Args, spec: str) -> None:
        self._found, self._args, self._spec = found, args, spec
        self._worker: Worker | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def build(self) -> None:
        """Start the process, which resolves the environment by its name and constructs it."""
        self._worker = Worker(self._found.ref.label, "slime_environments.session.child")
        self._reader, self._writer = await asyncio.open_unix_connection(sock=self._worker.sock)
        await self._ask("build", self._spec, pack_args(self._args))

    async def call(self, method: str, *args: Any, **keywords: Any) -> Any:
        """Call a method in the process; samples are sent there, and their changes are sent back."""
        samples = [value for value in args if isinstance(value, Sample)]
        sent = [PackedSample(sample_state(value)) if isinstance(value, Sample) else value for value in args]
        answer, changed = await self._ask("call", method, sent, keywords)
        for sample, fields in zip(samples, changed, strict=True):
            apply(sample, fields)
        return answer

    async def end(self) -> None:
        """Kill and reap the process."""
        self.abandon()

    def abandon(self) -> None:
        """Kill the process and all its children; a thread waits for the end."""
        if self._writer is not None:
            self._writer.close()
        if self._worker is None:
            return
        worker, self._worker = self._worker, None
        threading.Thread(target=_end, args=(worker,), name="slime: end an environment", daemon=True).start()

    async def _ask(self, *request: Any) -> Any:
        assert self._reader is not None
        assert self._writer is not None
        message = pickle.dumps(request)
        try:
            self._writer.write(HEADER.pack(len(message)) + message)
            await self._writer.drain()
            (size,) = HEADER.unpack(await self._reader.readexactly(HEADER.size))
            answer = pickle.loads(await self._reader.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError):
            raise PluginError(f"{self._found.ref.label}: its process has ended") from None
        if answer[0] == "ok":
            return answer[1]
        raise PluginError(answer[1])


class PackedSample(dict[str, Any]):
    """A sample in the form in which it is sent to the process."""


def _end(worker: Worker) -> None:
    try:
        worker.end()
    except SlimeError as error:
        logger.warning("%s", error)
