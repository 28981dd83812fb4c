"""Long-lived worker processes in which plain rewards run, killed and replaced when a call overruns or kills them.

`launch.resolver.Resolver` makes one pool per run; `adapters.RewardCaller` hands calls to it. One thread owns each
process: it starts it, writes a call, waits for the answer under the deadline, and kills the process with all it
started when none comes, so only the samples of that call are lost. A call whose process is killed by a signal is
made once more in a fresh one, since mostly somebody else killed it.

Calls of a component that answers fast are written several at once, twice as many each time while all answers together
take less than `_BATCH_S`; the process answers each as it is made, so each has its own deadline from when it begins.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from slime_core.errors import PluginError, SlimeError
from slime_core.plugins.execution import START_DEADLINE, Component
from slime_core.plugins.messages import pack_args
from slime_core.plugins.workers.process import Call, RewardProcess
from slime_core.procs.worker import WorkerDied
from slime_core.protocols import Args
from slime_core.types import Sample
from slime_core.waits import placed

logger = logging.getLogger(__name__)

_BATCH_S = 0.02
"""Seconds that calls written at once may take together."""
_BATCH_CALLS = 64
_LINGER_S = 0.001
"""Where fast calls come one upon another, for more of them to come."""


class WorkerPool:
    """`size` worker processes at most, started when first needed."""

    def __init__(self, args: Args, size: int, *, memory_limit: float | None = None) -> None:
        """Nothing is started yet.

        Args:
            args: The run's settings; workers get them as they are when the first worker starts, and again on
                `settings_changed`.
            size: Processes.
            memory_limit: GiB of address space of each, or None.
        """
        self.size = size
        self._args = args
        self._memory_limit = memory_limit
        self._packed: bytes | None = None
        self._queue: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._processes: set[RewardProcess] = set()
        self._components: dict[Component, None] = {}
        """Loaded somewhere, so a replacement loads them before it is asked."""
        self._batch: dict[Component, int] = {}
        """How many calls of it are written at once."""
        self._idle = 0
        self._closed = False

    async def score(
        self,
        component: Component,
        samples: Sequence[Sample],
        evaluation: bool,
        timeout: float | None,
        seed: int = 0,
    ) -> list[Any]:
        """Rewards of the samples, which get what the reward changed in them; `timeout` counts running time only.

        `waits.placed` is told when a process takes the call, in another thread.

        Raises:
            DeadlineExceeded: No answer in time; the process is dead.
            WorkerDied: The process ended.
            WorkerError: The reward raised.
            PluginError: The component cannot be loaded there, answers nonsense, or a sample cannot be sent.
        """
        call = Call(component, samples, evaluation, timeout, seed, placed())
        self._submit(call)
        try:
            return await call.future
        except asyncio.CancelledError:
            call.given_up = True
            if (process := call.process) is not None:
                process.kill()
            raise

    async def load(self, component: Component) -> None:
        """Start every worker, and wait until one has loaded the component. Raises as `score`."""
        await self.score(component, (), False, None)
        self._components[component] = None
        for _ in range(self.size):
            self._start_thread()

    def settings_changed(self) -> None:
        """Have every worker see the settings as they are now, from its next call on."""
        with self._lock:
            if self._packed is not None:  # else the first worker packs them
                self._packed = pack_args(self._args)

    def close(self) -> None:
        """Kill every worker; calls that wait or run fail. Safe to call twice."""
        with self._lock:
            self._closed = True
            processes, threads = list(self._processes), list(self._threads)
        for process in processes:
            process.kill()
        for _ in threads:
            self._queue.put(None)
        for thread in threads:
            thread.join(timeout=START_DEADLINE)
        atexit.unregister(self.close)

    def _submit(self, call: Call) -> None:
        with self._lock:
            if self._closed:
                raise PluginError("the worker processes of rewards have been stopped")
            lacking = self._idle <= self._queue.qsize()
        self._queue.put(call)
        if lacking:
            self._start_thread()

    def _start_thread(self) -> None:
        with self._lock:
            if len(self._threads) >= self.size or self._closed:
                return
            if not self._threads:
                self._packed = pack_args(self._args)
                atexit.register(self.close)
            name = f"slime-reward-worker-{len(self._threads)}"
            thread = threading.Thread(target=self._own, name=name, daemon=True)
            self._threads.append(thread)
        thread.start()

    # -- on an owner's thread ------------------------------------------------------------------------

    def _own(self) -> None:
        process: RewardProcess | None = None
        broken = False
        while True:
            if process is None and not broken and not self._closed:
                with contextlib.suppress(Exception):  # tried again, and reported, by the call that needs it
                    process = self._started()  # before it is needed: the next call does not wait for an interpreter
            with self._lock:
                self._idle += 1
            asked = time.monotonic()
            call = self._queue.get()
            if call is not None and self._batch.get(call.component, 1) > 1 and time.monotonic() < asked + _LINGER_S:
                time.sleep(_LINGER_S)
            with self._lock:
                self._idle -= 1
            if call is None:
                break
            began, calls = time.monotonic(), self._with_others(call)
            left = calls
            if process is not None and len(calls) > 1:
                left = self._run_all(calls, process)
                process = process if process.usable else None
            for call in left:
                if not call.given_up:
                    process, broken = self._run(call, process)
                    _deliver([call])
            fast = time.monotonic() - began < _BATCH_S
            size = max(self._batch.get(calls[0].component, 1), min(2 * len(calls), _BATCH_CALLS))
            self._batch[calls[0].component] = size if fast else max(1, len(calls) // 4)
        if process is not None:
            self._end(process)

    def _with_others(self, call: Call) -> list[Call]:
        """The call with as many of those that wait as go with it."""
        calls = [call]
        share = self._queue.qsize() // max(len(self._threads), 1) + 1
        while len(calls) < min(self._batch.get(call.component, 1), share):
            try:
                other = self._queue.get_nowait()
            except queue.Empty:
                break
            if other is None or (other.component, other.timeout) != (call.component, call.timeout):
                self._queue.put(other)
                break
            calls.append(other)
        return calls

    def _run_all(self, calls: list[Call], process: RewardProcess) -> list[Call]:
        """Make the calls in one go, as far as all goes well; the rest waits anew. Those to be made here, alone."""
        assert self._packed is not None
        done, left = list[Call](), deque(calls)
        try:
            process.update(self._packed)
            for _ in process.run_all(calls):
                done.append(left.popleft())
                if not process.has_answer:
                    _deliver(done)
                    done = []
        except BaseException as error:
            if not process.usable:
                self._end(process)
            # Of the call that ran; after a signal that one is made again.
            if left[0].process is not None and not _was_killed(error):
                left[0].outcome = error
                done.append(left.popleft())
        _deliver(done)
        killed = [left.popleft()] if left and left[0].process is not None else []
        with self._lock:
            if not self._closed:  # else nobody may take them any more
                while left:
                    self._queue.put(left.popleft())
        for call in [*killed, *left]:
            call.process = None
        return [*killed, *left]

    def _run(self, call: Call, process: RewardProcess | None) -> tuple[RewardProcess | None, bool]:
        """Make one call; the process that is there then, and whether none could be started."""
        assert self._packed is not None
        broken = False
        for again in (True, False):
            try:
                broken = process is None
                process = process or self._started()
                broken = False
                call.process = process
                call.begun()
                process.update(self._packed)
                call.outcome = process.run(call)
            except BaseException as error:
                call.outcome = error
            finally:
                call.process = None
            if process is not None and not process.usable:
                self._end(process)
                process = None
            # Whoever killed it meant the process; the call gets one more, with the same random numbers.
            if not (again and _was_killed(call.outcome)) or call.given_up or self._closed:
                break
        return process, broken

    def _started(self) -> RewardProcess:
        """A process that answers and has tried to load what is known. Raises DeadlineExceeded, WorkerDied."""
        assert self._packed is not None
        if self._closed:
            raise WorkerDied("the run has ended")
        process = RewardProcess()
        with self._lock:
            self._processes.add(process)
        try:
            if self._closed:  # close() may have looked before the process was there
                raise WorkerDied("the run has ended")
            process.begin(self._packed, self._memory_limit)
            for component in list(self._components):
                with contextlib.suppress(Exception):  # the call that needs it loads again and reports
                    process.load(component)
            if not process.usable:
                raise WorkerDied("a worker process did not survive loading its rewards")
        except BaseException:
            self._end(process)
            raise
        return process

    def _end(self, process: RewardProcess) -> None:
        try:
            process.end()
        except SlimeError as error:
            logger.warning("%s", error)
        with self._lock:
            self._processes.discard(process)


def _was_killed(outcome: object) -> bool:
    """Whether a signal ended the process that ran the call."""
    return isinstance(outcome, WorkerDied) and outcome.killed


def _deliver(calls: Sequence[Call]) -> None:
    """Have those who wait for the calls get their outcomes, all of a loop in one turn of it."""
    for loop, group in groupby(calls, key=lambda call: call.future.get_loop()):
        with contextlib.suppress(RuntimeError):  # it is closed, and nobody waits
            loop.call_soon_threadsafe(_settle, list(group))


def _settle(calls: Sequence[Call]) -> None:
    for call in calls:
        if call.future.done():
            continue
        if isinstance(call.outcome, BaseException):
            call.future.set_exception(call.outcome)
        else:
            call.future.set_result(call.outcome or [])
