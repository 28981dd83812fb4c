"""The servers that answer for one model, and what is known about each.

The client (event loop of the rollout stage) chooses among the ready ones; the supervisor (a thread of its own) takes
them out and puts them back. Both work at the same time, so every change goes through a method of the pool, under its
lock.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum

from slime_core.errors import EngineError

_SESSIONS = 65_536
_UNLOCK_POLL_S = 0.02


class WorkerState(StrEnum):
    """Whether a server may be asked for tokens."""

    STARTING = "starting"
    READY = "ready"
    QUARANTINED = "quarantined"
    """Dead, hung, or not known to serve the current weights: nothing goes there until it is brought back."""
    LOST = "lost"
    """Out for the rest of the run."""


@dataclass(eq=False)
class Worker:
    """One server; several processes may stand behind it (tensor parallelism)."""

    url: str
    """http://HOST:PORT, without a slash at the end."""
    owned: bool = False
    """We launched it, so we may restart it."""
    role: str = "regular"
    """regular, prefill, decode or encoder, as the router calls them."""
    bootstrap_port: int | None = None
    """Where decode servers meet this prefill server; the router tells them."""
    state: WorkerState = WorkerState.STARTING
    reason: str = ""
    """Why it is quarantined or lost."""
    since: float = field(default_factory=time.monotonic)
    """`time.monotonic()` of the last change of its state."""
    awaited: bool = False
    """While it is quarantined somebody brings it back, or waits for it: requests wait instead of failing."""
    software: str = ""
    """Version the server reports, such as "0.5.20"; empty for servers that say none."""
    weight_version: int | None = None
    """Of the last update that it is known to have taken; None while it serves what it loaded at its start."""
    loaded: tuple[int | None, str] | None = None
    """Version wanted and model path reported, when they were last compared; None: it has loaded something since."""
    busy: int = 0
    """Requests of ours in flight."""
    progress: float = 0.0
    """`time.monotonic()` of the last answer, or part of one; a busy server that answers is not hung."""


class WorkerPool:
    """The workers of one model."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        self.version_wanted: int | None = None
        """Weight version every ready worker serves; None before the first update."""
        self.version_coming: int | None = None
        """What an update that is under way brings them to; some serve it already."""
        self.update_lock = threading.Lock()
        """Held while weights are pushed, and while a worker is brought back: one must not overtake the other."""
        self.paused = False
        """Generation is paused or the servers gave their memory up: what asks for a token would wait."""
        self.pause_mode: str | None = None
        """How the engine's caller paused generation; None: it did not."""
        self.interruptions = 0
        """Times that a weight update was about to end requests that nobody had asked to abort."""
        self._workers = list(workers)
        self._lock = threading.Lock()
        self._sessions: OrderedDict[str, Worker] = OrderedDict()
        self._listeners: list[Callable[[Worker], None]] = []

    @property
    def workers(self) -> list[Worker]:
        """All of them."""
        with self._lock:
            return list(self._workers)

    @property
    def ready(self) -> list[Worker]:
        """Those that may be asked."""
        with self._lock:
            return [w for w in self._workers if w.state is WorkerState.READY]

    @property
    def recovering(self) -> bool:
        """Whether it is worth waiting for one that is out."""
        return any(w.awaited and w.state is not WorkerState.LOST for w in self.workers)

    def on_change(self, listener: Callable[[Worker], None]) -> None:
        """Have `listener` called after each change of state, in the thread that made it."""
        self._listeners.append(listener)

    def set_state(self, worker: Worker, state: WorkerState, reason: str = "") -> None:
        """Take a worker out, or put it back, unless it is lost."""
        with self._lock:
            if worker.state is WorkerState.LOST:
                return
            known, worker.reason = worker.state is state, reason
            if known:
                return
            worker.state, worker.since = state, time.monotonic()
        for listener in self._listeners:
            listener(worker)

    @asynccontextmanager
    async def updating(self, seconds: float, late: Exception) -> AsyncIterator[None]:
        """Hold `update_lock`, which another thread's event loop may hold: waited for without blocking this one.

        Raises `late` after so many seconds.
        """
        deadline = time.monotonic() + seconds
        while not self.update_lock.acquire(blocking=False):
            if time.monotonic() > deadline:
                raise late
            await asyncio.sleep(_UNLOCK_POLL_S)
        try:
            yield
        finally:
            self.update_lock.release()

    def interrupt(self) -> None:
        """Say that requests are about to be ended for the sake of an update; whoever waits for them goes on."""
        with self._lock:
            self.interruptions += 1

    def acquire(self, session_id: str | None = None, *, avoid: Collection[Worker] = ()) -> Worker:
        """The session's worker if it is ready, else the least busy one; counts a request, which `release` takes back.

        Args:
            session_id: Requests of one session go to one worker while it is ready.
            avoid: Workers that failed this request; taken only when no other is ready.

        Raises:
            EngineError: None is ready; the message says what became of each.
        """
        with self._lock:
            worker = self._sessions.get(session_id) if session_id is not None else None
            if worker is None or worker.state is not WorkerState.READY or worker in avoid:
                ready = [w for w in self._workers if w.state is WorkerState.READY]
                if not ready:
                    raise EngineError(f"no engine is ready: {self.describe()}")
                worker = min(ready, key=lambda w: (w in avoid, w.busy)) if len(ready) > 1 else ready[0]
            if session_id is not None:
                self._sessions[session_id] = worker
                self._sessions.move_to_end(session_id)
                if len(self._sessions) > _SESSIONS:
                    self._sessions.popitem(last=False)
            worker.busy += 1
            return worker

    def release(self, worker: Worker) -> None:
        """The request that `acquire` counted is over."""
        with self._lock:
            worker.busy -= 1

    def progressed(self, worker: Worker) -> None:
        """An answer, or a part of one, came from it."""
        worker.progress = time.monotonic()

    def describe(self) -> str:
        """What became of each, for messages."""
        if not self._workers:
            return "none was found"
        return "; ".join(map(_describe, self._workers))


def _describe(worker: Worker) -> str:
    if worker.state is WorkerState.LOST:
        return f"{worker.url} {worker.reason}"
    return f"{worker.url} {worker.state.value}{f' ({worker.reason})' if worker.reason else ''}"
