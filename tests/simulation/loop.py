"""A virtual-time event loop: no real sleeping, and the order of ready tasks comes from a seed.

`world.py` runs the control plane in one of these. Time stands still while anything is ready and then jumps to the next
timer, so an hour of deadlines costs what its callbacks cost. Tasks that are ready at the same time run in an order
drawn from the seed; plain callbacks keep theirs, which asyncio promises. Nothing comes from outside such a loop, so
"nothing is ready and no timer runs" is a wait that never ends, and raises `Deadlock`.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
import time
import warnings
from asyncio import base_events
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager, suppress
from typing import Any, TypeVar, cast

T = TypeVar("T")
_THREAD_SECONDS = 1.0
"""Up to so long may a call in an executor take."""


class SimulationError(AssertionError):
    """What a simulation finds: the code under test breaks a promise."""


class Deadlock(SimulationError):
    """Tasks wait, nothing is ready and no timer runs."""


class Endless(SimulationError):
    """More callbacks, or more virtual time, than a run of this size can need."""


class VirtualClock:
    """The time of one simulated run, in seconds; it survives the event loops of its lives."""

    def __init__(self) -> None:
        self.now = 0.0

    @contextmanager
    def installed(self) -> Iterator[None]:
        """`time.monotonic` and `time.perf_counter` tell this time inside; two calls never tell the same.

        For the whole process: code that imported the functions by name keeps the real ones.
        """
        real, ticks = (time.monotonic, time.perf_counter), itertools.count(1)

        def tell() -> float:
            return self.now + next(ticks) * 1e-9

        time.monotonic = time.perf_counter = tell
        try:
            yield
        finally:
            time.monotonic, time.perf_counter = real


class _Counted:
    """Hash by number of creation: sets of tasks and futures iterate alike in every run."""

    _number = 0

    def __hash__(self) -> int:
        return self._number


class _Task(_Counted, asyncio.Task[Any]):
    pass


class _Future(_Counted, asyncio.Future[Any]):
    pass


class SimulatedLoop(base_events.BaseEventLoop):
    """An event loop without sockets, signals, processes and threads.

    Args:
        rng: Draws the order of ready tasks and how long calls in executors take.
        clock: Shared with what else tells the time.
        max_turns: Callbacks until the loop raises `Endless`.
        max_seconds: Virtual seconds until it does.
    """

    def __init__(
        self,
        rng: random.Random,
        clock: VirtualClock | None = None,
        *,
        max_turns: int = 200_000,
        max_seconds: float = 1e6,
    ) -> None:
        super().__init__()
        self.clock = clock or VirtualClock()
        self.turns = 0
        self._rng = rng
        self._max_turns = max_turns
        self._end = self.clock.now + max_seconds
        self._killed: BaseException | None = None
        self._numbers = itertools.count()
        self._made: list[asyncio.Task[Any]] = []
        """Every task, so that none of them ends when the garbage collector happens to run: `discard` ends them."""
        self._ready: Any
        self._scheduled: list[asyncio.TimerHandle]

    # -- what asyncio calls ----------------------------------------------------------------------------

    def time(self) -> float:
        """Virtual seconds."""
        return self.clock.now

    def create_future(self) -> asyncio.Future[Any]:
        """A future that hashes alike in every run."""
        future = _Future(loop=self)
        future._number = next(self._numbers)
        return future

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, T], *, name: str | None = None, context: Any = None
    ) -> asyncio.Task[T]:
        """A task that hashes alike in every run, named by its number where it has no name."""
        number = next(self._numbers)
        task = _Task.__new__(_Task)
        task._number = number  # before its initialiser, which keeps it in a set
        task.__init__(coro, loop=self, name=name or f"task-{number}", context=context)  # type: ignore[misc]
        self._made.append(task)
        return cast("asyncio.Task[T]", task)

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: Any = None
    ) -> asyncio.Handle:
        """There is one thread."""
        return self.call_soon(callback, *args, context=context)

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """Call `func` in this thread after a virtual moment, whatever the executor."""
        future = self.create_future()

        def call() -> None:
            if future.done():
                return
            try:
                future.set_result(func(*args))
            except Exception as error:
                future.set_exception(error)

        self.call_later(self._rng.random() * _THREAD_SECONDS, call)
        return future

    def _run_once(self) -> None:
        if self._killed is not None:
            raise self._killed
        timers, ready = self._scheduled, self._ready
        while timers and timers[0]._cancelled:
            heapq.heappop(timers)._scheduled = False  # type: ignore[attr-defined]
        if not ready and not self._stopping:  # type: ignore[attr-defined]
            self._jump(timers)
        while timers and timers[0].when() <= self.clock.now:
            timer = heapq.heappop(timers)
            timer._scheduled = False  # type: ignore[attr-defined]
            ready.append(timer)
        for handle in self._permuted(list(ready)):
            if handle._cancelled:
                continue
            self.turns += 1
            handle._run()
            if self._killed is not None:
                raise self._killed
        if self.turns > self._max_turns:
            raise Endless(f"{self.turns} callbacks at {self.clock.now:.3f} s and no end:\n{self.describe_tasks()}")

    def _jump(self, timers: list[asyncio.TimerHandle]) -> None:
        if not timers:
            raise Deadlock(
                f"at {self.clock.now:.3f} s nothing is ready and no timer runs, so this waits for ever:\n"
                f"{self.describe_tasks()}"
            )
        self.clock.now = max(self.clock.now, timers[0].when())
        if self.clock.now > self._end:
            raise Endless(f"still running at {self.clock.now:.0f} s:\n{self.describe_tasks()}")

    def _permuted(self, handles: list[Any]) -> list[Any]:
        """Ready tasks in a drawn order, at the places that tasks have; plain callbacks stay where they are."""
        self._ready.clear()
        if len(handles) > 1:
            places = [i for i, h in enumerate(handles) if isinstance(getattr(h._callback, "__self__", None), _Task)]
            if len(places) > 1:
                drawn = [handles[i] for i in places]
                self._rng.shuffle(drawn)
                for place, handle in zip(places, drawn):
                    handles[place] = handle
        return handles

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """A callback that raises ends the run; of tasks nobody asked for, only the garbage collector tells when."""
        if "handle" in context and self._killed is None and not self.is_closed():
            self.kill(SimulationError(f"a callback raised {context.get('exception')!r}"))

    def _process_events(self, event_list: Any) -> None:
        """There are none."""

    def _write_to_self(self) -> None:
        """Nothing sleeps that would have to be woken."""

    # -- what a simulation calls -----------------------------------------------------------------------

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """What the coroutine returns (`asyncio.Runner.run` without its signal handler)."""
        return self.run_until_complete(self.create_task(coroutine))

    def kill(self, error: BaseException) -> None:
        """Stop as a killed process does: not one more callback runs, and whoever runs the loop gets `error`."""
        self._killed = error

    def describe_tasks(self) -> str:
        """One line per unfinished task: its name and the lines it waits at, outermost first."""
        tasks = sorted((t for t in asyncio.all_tasks(self)), key=hash)
        return "\n".join(f"  {t.get_name()}: {_where(t.get_coro())}" for t in tasks) or "  no task"

    def discard(self) -> None:
        """Throw away what is left after `kill` or an error, without a word about tasks that were not awaited."""
        self._killed = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            for task in sorted(asyncio.all_tasks(self), key=hash):
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                coroutine: Any = task.get_coro()
                with suppress(BaseException):  # what a dead process would still have liked to do
                    coroutine.close()
        self._made.clear()
        self.close()


def _where(coroutine: Any) -> str:
    """The chain of `await`s of a suspended coroutine."""
    lines: list[str] = []
    while coroutine is not None and len(lines) < 20:
        frame = getattr(coroutine, "cr_frame", None)
        if frame is None:
            lines.append(repr(coroutine)[:120])
            break
        code = frame.f_code
        lines.append(f"{code.co_qualname} ({code.co_filename.rpartition('/')[2]}:{frame.f_lineno})")
        coroutine = coroutine.cr_await
        if not hasattr(coroutine, "cr_await"):
            break
    return " > ".join(lines)
