"""Long-lived worker processes in which plain rewards run, killed and replaced when a call overruns or kills them.

`launch.resolver.Resolver` makes one pool per run; `adapters.RewardCaller` hands calls to it. One thread owns each
process: it starts it, writes calls, and waits for results until the deadline. If a result is late, it kills the process
and all its children, so only the samples of that call are lost. A call whose process is killed by a signal is repeated
once in a new process, since the call is rarely the cause of the kill.

Calls made in one iteration of the event loop are passed on together. For a fast component, as many calls are written at
once as take `_BATCH_S` together. The process sends each result when it is ready, so each call has its own deadline,
counted from its start.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import queue
import threading
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
from slime_core.sample import Sample
from slime_core.waits import placed

logger = logging.getLogger(__name__)

_BATCH_S = 0.01
"""Seconds that calls written at once may take together."""
_BATCH_CALLS = 32
"""Calls per message: more would save little, and all calls behind one that hangs wait until its deadline."""
_SLOW_S = 1.0
"""Assumed seconds per call if none has been timed, or if another call has just ended its process."""
_STOPPED = "the worker processes of rewards have been stopped"


class WorkerPool:
    """A pool of at most `size` worker processes, started when first needed."""

    def __init__(self, args: Args, size: int, *, memory_limit: float | None = None) -> None:
        """Create the pool without starting a process.

        Args:
            args: The run's settings; workers get a copy when the first worker starts, and again on
                `settings_changed`.
            size: Number of processes.
            memory_limit: Address space of each process in GiB, or None.
        """
        self.size = size
        self._args = args
        self._memory_limit = memory_limit
        self._packed: bytes | None = None
        self._coming: dict[asyncio.AbstractEventLoop, list[Call]] = {}
        """Calls made since the last iteration of each loop."""
        self._queue: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._processes: set[RewardProcess] = set()
        self._components: dict[Component, None] = {}
        """Components loaded in some process; a replacement process loads them before its first call."""
        self._seconds: dict[str, float] = {}
        """Seconds per call of a component, estimated from its calls so far."""
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
        """Return the rewards of the samples, and copy the reward's changes into the samples.

        `timeout` counts running time only. `waits.placed` is notified, from another thread, when a process takes the
        call.

        Raises:
            DeadlineExceeded: No result in time; the process is dead.
            WorkerDied: The process ended.
            WorkerError: The reward raised.
            PluginError: The component cannot be loaded in the process or returned an invalid value, or a sample cannot
                be sent.
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
        """Make every worker use the current settings from its next call on."""
        with self._lock:
            if self._packed is not None:  # else the first worker packs them
                self._packed = pack_args(self._args)

    def close(self) -> None:
        """Kill every worker; waiting and running calls fail. Safe to call twice."""
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
        if self._closed:
            raise PluginError(_STOPPED)
        loop = call.future.get_loop()
        self._coming.setdefault(loop, []).append(call)
        if len(self._coming[loop]) == 1:
            loop.call_soon(self._hand_over, loop)

    def _hand_over(self, loop: asyncio.AbstractEventLoop) -> None:
        calls = self._coming.pop(loop)
        with self._lock:
            closed = self._closed
            for call in () if closed else calls:
                self._queue.put(call)
            lacking = self._queue.qsize() - self._idle
        if closed:
            _settle(calls, PluginError(_STOPPED))
        for _ in range(lacking):
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
                with contextlib.suppress(Exception):  # the call that needs it tries again and reports the error
                    process = self._started()  # ahead of need: the next call does not wait for an interpreter
            with self._lock:
                self._idle += 1
            call = self._queue.get()
            with self._lock:
                self._idle -= 1
            if call is None:
                break
            wanted = deque(call for call in self._with_others(call) if not call.given_up)
            process, broken = self._run(wanted, process)
        if process is not None:
            self._end(process)

    def _with_others(self, call: Call) -> list[Call]:
        """Return the call, with as many waiting calls as fit into the same message."""
        calls = [call]
        share = self._queue.qsize() // max(len(self._threads), 1) + 1
        most = min(share, _BATCH_CALLS, int(_BATCH_S / self._seconds.get(call.component.key, _SLOW_S)))
        while len(calls) < most:
            try:
                other = self._queue.get_nowait()
            except queue.Empty:
                break
            if other is None or (other.component, other.timeout) != (call.component, call.timeout):
                self._queue.put(other)
                break
            calls.append(other)
        return calls

    def _run(self, left: deque[Call], process: RewardProcess | None) -> tuple[RewardProcess | None, bool]:
        """Make calls of one component. Return the process in use afterwards, and whether starting one failed.

        If a call overruns or ends its process, the calls behind it go back into the queue.
        """
        assert self._packed is not None
        broken = False
        while left:
            done, key = list[Call](), left[0].component.key
            try:
                broken = process is None
                process = process or self._started()
                broken = False
                process.update(self._packed)
                for seconds in process.run_all(list(left)):
                    done.append(left.popleft())
                    before = self._seconds.get(key, _SLOW_S)
                    self._seconds[key] = max(seconds, before + (seconds - before) / 4)
                    if not process.has_answer:
                        _deliver(done)
                        done = []
            except BaseException as error:
                self._seconds[key] = _SLOW_S
                call = left.popleft()
                call.process = None
                with self._lock:
                    while left and not self._closed:  # after closing, no thread takes queued calls
                        self._queue.put(left.popleft())
                # The kill was meant for the process, not for the call: retry it once, with the same random numbers.
                killed = isinstance(error, WorkerDied) and error.killed
                if killed and not (call.again or call.given_up or self._closed):
                    call.again = True
                    left.appendleft(call)
                else:
                    call.outcome = error
                    done.append(call)
            if process is not None and not process.usable:
                self._end(process)
                process = None
            _deliver(done)
        return process, broken

    def _started(self) -> RewardProcess:
        """Start a process that has tried to load the known components. Raises DeadlineExceeded, WorkerDied."""
        assert self._packed is not None
        if self._closed:
            raise WorkerDied("the run has ended")
        process = RewardProcess()
        with self._lock:
            self._processes.add(process)
        try:
            if self._closed:  # close() may have run before the process was registered
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


def _deliver(calls: Sequence[Call]) -> None:
    """Deliver the outcomes to the waiting callers; one event loop gets all its outcomes in one iteration."""
    for loop, group in groupby(calls, key=lambda call: call.future.get_loop()):
        with contextlib.suppress(RuntimeError):  # the loop is closed: no caller waits
            loop.call_soon_threadsafe(_settle, list(group))


def _settle(calls: Sequence[Call], error: Exception | None = None) -> None:
    for call in calls:
        outcome = error or call.outcome
        if call.future.done():
            continue
        if isinstance(outcome, BaseException):
            call.future.set_exception(outcome)
        else:
            call.future.set_result(outcome or [])
