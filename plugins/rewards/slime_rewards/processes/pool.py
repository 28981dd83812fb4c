"""Long-lived worker processes in which plain rewards run, killed and replaced when a call overruns or kills them.

`launch.components.Resolver` makes one pool per run; `plugins.adapters.RewardCaller` hands calls to it;
`processes.scoring` runs inside each process. One thread owns each process: it starts it, writes calls, and waits
for results until the deadline. If a result is late, it kills the process and all its children, so only the samples of
that call are lost. A call whose process is killed by a signal is repeated once in a new process, since the call is
rarely the cause of the kill.

Calls made in one iteration of the event loop are passed on together. For a fast component, as many calls are written at
once as take `_BATCH_S` together. The process sends each result when it is ready, so each call has its own deadline,
counted from its start.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import pickle
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from slime_core.errors import PluginError, SlimeError
from slime_core.plugins.adapters import LOAD_DEADLINE, Component
from slime_core.protocols import Args
from slime_core.sample import Sample
from slime_core.waits import placed
from slime_core.workers.call import overrun
from slime_rewards.processes.messages import apply, pack_args, sample_state
from slime_rewards.processes.worker import Worker, WorkerDied

logger = logging.getLogger(__name__)

START_DEADLINE = 60.0
"""Seconds that a new interpreter may take to start."""
_BATCH_S = 0.01
"""Seconds that calls written at once may take together."""
_BATCH_CALLS = 32
"""Calls per message: more would save little, and all calls behind one that hangs wait until its deadline."""
_BATCH_BYTES = 1 << 16
"""Size limit of all requests after the first, in bytes: a socket's buffer, so that neither side blocks on a write."""
_SLOW_S = 1.0
"""Assumed seconds per call if none has been timed, or if another call has just ended its process."""
_STOPPED = "the worker processes of rewards have been stopped"


@dataclass
class Call:
    """A call of a reward, and its outcome."""

    component: Component
    samples: Sequence[Sample]
    evaluation: bool
    timeout: float | None
    seed: int
    begun: Callable[[], None]
    future: asyncio.Future[list[Any]] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    process: RewardProcess | None = None
    """The process that runs the call now."""
    given_up: bool = False
    """True once the caller gave up."""
    again: bool = False
    """True if a process was killed while it ran this call."""
    outcome: list[Any] | BaseException = field(default_factory=list)
    """Rewards, or the error."""

    def request(self) -> bytes:
        """Return the bytes to send: empty if there are no samples, or if one cannot be sent, which sets the error."""
        if not self.samples:
            return b""
        try:
            states = pickle.dumps([sample_state(sample) for sample in self.samples])
        except Exception as error:
            self.outcome = PluginError(
                f"sample {self.samples[0].index} cannot be sent to a worker process ({type(error).__name__}: {error});"
                " keep plain data in sample.metadata, or declare RewardTraits(execution='thread') on the reward"
            )
            self.outcome.__cause__ = error
            return b""
        return pickle.dumps(("score", self.component.key, states, self.evaluation, self.seed))

    def settle(self, word: str, *rest: Any) -> None:
        """Set the outcome from the worker's answer, and apply the reward's changes to the samples."""
        if word != "ok":
            self.outcome = _error(*rest)
            return
        rewards, changed = rest
        for sample, fields in zip(self.samples, changed):
            apply(sample, fields)
        self.outcome = list(rewards)


class WorkerError(Exception):
    """Error that the reward raised in its worker; subclasses carry the name of the original class."""

    worker_traceback: str = ""


class RewardProcess(Worker):
    """A worker process that computes rewards, used by the thread that owns it."""

    def __init__(self, memory_limit: float | None) -> None:
        super().__init__("a worker process of rewards", "slime_rewards.processes.scoring")
        self._memory_limit = memory_limit
        self._loaded: set[Component] = set()
        self._args = b""

    def update(self, args: bytes) -> None:
        """Send the packed settings `args` of the pool to the process, unless it already has them."""
        if args is not self._args:
            self._ask(("update", args, self._memory_limit), START_DEADLINE, "the start of a worker process")
            self._args = args

    def load(self, component: Component) -> None:
        """Resolve and build a component in the process, unless this has been done."""
        if component not in self._loaded:
            request = ("load", component.key, component.spec, component.group, component.options)
            self._ask(request, LOAD_DEADLINE, f"loading {component.spec!r} in a worker process:")
            self._loaded.add(component)

    def run_all(self, calls: Sequence[Call]) -> Iterator[float]:
        """Score calls of one component and deadline, in order; load the component first if needed.

        Yields the seconds of each call once it has its outcome. Raises as `ask`, for the next call.
        """
        calls[0].process = self
        calls[0].begun()
        self.load(calls[0].component)
        requests = [call.request() for call in calls]
        timeout, start = calls[0].timeout, 0
        while start < len(calls):
            end, size = start + 1, 0
            while end < len(calls) and (size := size + len(requests[end])) <= _BATCH_BYTES:
                end += 1
            answers = self.ask_all(list(filter(None, requests[start:end])), timeout)
            for call, request in zip(calls[start:end], requests[start:end]):
                seconds = 0.0
                if request:
                    call.process = self
                    call.begun()
                    try:
                        seconds, *answer = next(answers)
                    except TimeoutError:
                        raise overrun("--rm-timeout", timeout) from None
                    call.process = None
                    call.settle(*answer)
                yield seconds
            start = end

    def _ask(self, request: tuple[Any, ...], timeout: float, flag: str) -> None:
        """Send a request and wait for its completion."""
        try:
            _, word, *rest = self.ask(request, timeout)
        except TimeoutError:
            raise overrun(flag, timeout) from None
        if word != "ok":
            raise _error(*rest)


def _error(kind: str, text: str, worker_traceback: str) -> Exception:
    """Return an exception that reads like the exception raised in the worker."""
    if kind.startswith("Plugin"):
        error: Exception = PluginError(text)
    else:
        error = type(kind, (WorkerError,), {"__module__": "builtins"})(text)
    error.worker_traceback = worker_traceback  # type: ignore[attr-defined]
    return error


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
        process = RewardProcess(self._memory_limit)
        with self._lock:
            self._processes.add(process)
        try:
            if self._closed:  # close() may have run before the process was registered
                raise WorkerDied("the run has ended")
            process.update(self._packed)
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
            call.future.set_result(outcome)
