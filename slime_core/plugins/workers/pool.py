"""Long-lived worker processes in which plain rewards run, killed and replaced when a call overruns or kills them.

`launch.components.Resolver` makes one pool per run; `adapters.RewardCaller` hands calls to it. One thread owns each
process: it starts it, writes a call, waits for the answer under the deadline, and kills the process's whole group
when none comes, so only the samples of that call are lost. What a reader would get wrong: the kernel ends a worker
when the *thread* that started it ends (PR_SET_PDEATHSIG), which is why the owners live as long as the pool.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import pickle
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from slime_core.errors import PluginError
from slime_core.plugins.workers.calls import HEADER, Component, apply, args_changes, pack_args, sample_state, send
from slime_core.plugins.workers.execution import LOAD_DEADLINE, DeadlineExceeded, overrun
from slime_core.protocols import Args
from slime_core.types import Sample

logger = logging.getLogger(__name__)

START_DEADLINE = 60.0
"""Seconds a fresh interpreter gets to come up."""
END_DEADLINE = 10.0
"""Seconds a killed process gets to be gone."""
_POLL = 0.5
"""How often an owner looks whether its process is alive although the socket is silent."""
_THREADS_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""Set to 1 for workers where the user has not: several processes share the cores."""
_BOOT = (
    "import sys; sys.path[:] = {path!r}; from slime_core.plugins.workers.main import main; main({descriptor}, {parent})"
)


class WorkerDied(Exception):
    """The process ended during the call; the text says how."""


class WorkerError(Exception):
    """What the reward raised in its worker; subclasses carry the name of the original class."""

    worker_traceback: str = ""


@dataclass
class _Call:
    component: Component
    samples: Sequence[Sample]
    evaluation: bool
    timeout: float | None
    seed: int
    future: Future[list[Any]] = field(default_factory=Future)
    process: _Process | None = None
    """Which one runs it now."""


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
        self._queue: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._processes: set[_Process] = set()
        self._components: dict[Component, None] = {}
        """Loaded somewhere, so a replacement loads them before it is asked."""
        self._idle = 0
        self._closed = False

    async def score(
        self, component: Component, samples: Sequence[Sample], evaluation: bool, timeout: float | None, seed: int = 0
    ) -> list[Any]:
        """Rewards of the samples, which get what the reward changed in them; `timeout` counts running time only.

        Raises:
            DeadlineExceeded: No answer in time; the process is dead.
            WorkerDied: The process ended.
            WorkerError: The reward raised.
            PluginError: The component cannot be loaded there, answers nonsense, or a sample cannot be sent.
        """
        call = _Call(component, samples, evaluation, timeout, seed)
        self._submit(call)
        try:
            return await asyncio.wrap_future(call.future)
        except asyncio.CancelledError:
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

    def _submit(self, call: _Call) -> None:
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
        process: _Process | None = None
        broken = False
        while True:
            if process is None and not broken and not self._closed:
                with contextlib.suppress(Exception):  # tried again, and reported, by the call that needs it
                    process = self._started()  # before it is needed: the next call does not wait for an interpreter
            with self._lock:
                self._idle += 1
            call = self._queue.get()
            with self._lock:
                self._idle -= 1
            if call is None:
                break
            if not call.future.set_running_or_notify_cancel():
                continue
            rewards, error = None, None
            try:
                if process is None:
                    broken = True
                    process = self._started()
                    broken = False
                call.process = process
                assert self._packed is not None
                process.update(self._packed)
                rewards = process.run(call)
            except BaseException as raised:
                error = raised
            call.process = None
            if process is not None and not process.usable:
                self._end(process)
                process = None
            if error is None:
                call.future.set_result(rewards or [])
            else:
                call.future.set_exception(error)
        if process is not None:
            self._end(process)

    def _started(self) -> _Process:
        """A process that answers and has tried to load what is known. Raises DeadlineExceeded, WorkerDied."""
        assert self._packed is not None
        if self._closed:
            raise WorkerDied("the run has ended")
        process = _Process()
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

    def _end(self, process: _Process) -> None:
        process.end()
        with self._lock:
            self._processes.discard(process)


class _Process:
    """One worker process; used by its owner's thread, but for `kill`."""

    def __init__(self) -> None:
        self.usable = True
        self._args = b""
        self._reaping = threading.Lock()
        self._sock, theirs = socket.socketpair()
        with theirs:
            self._loaded: set[Component] = set()
            boot = _BOOT.format(path=sys.path, descriptor=theirs.fileno(), parent=os.getpid())
            environment = {**dict.fromkeys(_THREADS_VARIABLES, "1"), **os.environ}
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", boot],
                stdin=subprocess.DEVNULL,
                stdout=sys.__stderr__.fileno() if sys.__stderr__ is not None else subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env=environment,
            )

    def begin(self, args: bytes, memory_limit: float | None) -> None:
        """Wait until it answers."""
        self._ask(("start", args, memory_limit), START_DEADLINE, "the start of a worker process")
        self._args = args

    def update(self, args: bytes) -> None:
        """Bring its settings to `args`, packed by the pool; nothing to do for those it has."""
        if args is not self._args:
            self._ask(("update", args_changes(self._args, args)), START_DEADLINE, "new settings in a worker process:")
            self._args = args

    def load(self, component: Component) -> None:
        """Resolve and build a component there, unless it has been."""
        if component not in self._loaded:
            request = ("load", component.key, component.spec, component.group, component.options)
            self._ask(request, LOAD_DEADLINE, f"loading {component.spec!r} in a worker process:")
            self._loaded.add(component)

    def run(self, call: _Call) -> list[Any]:
        """Score, loading the component first where this process has not seen it."""
        self.load(call.component)
        if not call.samples:
            return []
        try:
            states = pickle.dumps([sample_state(sample) for sample in call.samples])
        except Exception as error:
            raise PluginError(
                f"sample {call.samples[0].index} cannot be sent to a worker process ({type(error).__name__}: {error});"
                " keep plain data in sample.metadata, or declare RewardTraits(execution='thread') on the reward"
            ) from error
        request = ("score", call.component.key, states, call.evaluation, call.seed)
        rewards, changed = self._ask(request, call.timeout, "--rm-timeout")
        for sample, fields in zip(call.samples, changed):
            apply(sample, fields)
        return list(rewards)

    def kill(self) -> None:
        """End the process and everything in its group, from any thread."""
        with self._reaping:
            # A leader that is dead but not reaped keeps the group's id from being given to another.
            if self._process.returncode is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._process.pid, signal.SIGKILL)

    def end(self) -> int | None:
        """Kill, reap, close; the exit status, negative for a signal. None when the kernel does not let go of it."""
        self.kill()
        self._sock.close()
        if not self._wait_for_end(END_DEADLINE):
            logger.warning("worker process %d of rewards does not end though it was killed", self._process.pid)
            return None
        with self._reaping:
            return self._process.wait(END_DEADLINE)

    def _wait_for_end(self, seconds: float) -> bool:
        """Whether it ended in time; it is not reaped, so that its group can still be killed."""
        until = time.monotonic() + seconds
        while not self._has_ended():
            if time.monotonic() > until:
                return False
            time.sleep(0.005)
        return True

    def _has_ended(self) -> bool:
        if self._process.returncode is not None:
            return True
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def _ask(self, request: tuple[Any, ...], timeout: float | None, flag: str) -> Any:
        """Send a request and return what comes after "ok" in the answer."""
        until = None if timeout is None else time.monotonic() + timeout
        try:
            self._sock.settimeout(timeout)
            send(self._sock, pickle.dumps(request))
            size = HEADER.unpack(self._receive(HEADER.size, until))[0]
            answer = pickle.loads(self._receive(size, until))
        except TimeoutError:
            self.usable = False
            raise DeadlineExceeded(overrun(timeout, flag)) from None
        except OSError:
            self.usable = False
            raise WorkerDied(self._fate()) from None
        except BaseException:
            self.usable = False  # half an answer may be left in the socket
            raise
        if answer[0] == "ok":
            return answer[1:]
        raise _error(*answer[1:])

    def _receive(self, size: int, until: float | None) -> bytes:
        data = bytearray()
        while len(data) < size:
            rest = _POLL if until is None else min(_POLL, until - time.monotonic())
            if not select.select([self._sock], [], [], max(rest, 0.0))[0]:
                if rest <= 0:  # only now: after a standstill of this process the answer may be there
                    raise TimeoutError
                if self._has_ended():
                    raise ConnectionResetError("the process is gone, though a child of it holds the socket")
                continue
            part = self._sock.recv(min(size - len(data), 1 << 20))
            if not part:
                raise ConnectionResetError("closed")
            data += part
        return bytes(data)

    def _fate(self) -> str:
        """How the process ended; one that only closed its socket is killed."""
        closed_only = not self._wait_for_end(1.0)
        status = self.end()
        if closed_only or status is None:
            return "the worker process closed its connection"
        if status >= 0:
            return f"the worker process ended with exit status {status}"
        name = signal.Signals(-status).name
        hint = " (out of memory?)" if name == "SIGKILL" else ""
        return f"the worker process was ended by signal {name}{hint}"


def _error(kind: str, text: str, worker_traceback: str) -> Exception:
    """An exception that reads like the one raised in the worker."""
    if kind.startswith("Plugin"):
        error: Exception = PluginError(text)
    else:
        error = type(kind, (WorkerError,), {"__module__": "builtins"})(text)
    error.worker_traceback = worker_traceback  # type: ignore[attr-defined]
    return error
