"""The servers of one model, and the state of each.

The client (event loop of the rollout stage) chooses among the ready servers. The supervisor (a thread of its own) takes
servers out of the pool and puts them back. Both run at the same time, so every change goes through a method of the
pool, under its lock.
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
    """The state of a server, which decides whether it gets requests."""

    STARTING = "starting"
    READY = "ready"
    QUARANTINED = "quarantined"
    """Dead, hung, or not known to serve the current weights: it gets no requests until it is brought back."""
    LOST = "lost"
    """Removed for the rest of the run."""


@dataclass(eq=False)
class Worker:
    """A server, which may consist of several processes (tensor parallelism)."""

    url: str
    """URL http://HOST:PORT, without a slash at the end."""
    owned: bool = False
    """True if this run launched the server, so it may restart it."""
    role: str = "regular"
    """Role in the router's terms: regular, prefill, decode or encoder."""
    bootstrap_port: int | None = None
    """Port at which decode servers connect to this prefill server; the router sends it to them."""
    state: WorkerState = WorkerState.STARTING
    reason: str = ""
    """Reason for being quarantined or lost."""
    since: float = field(default_factory=time.monotonic)
    """`time.monotonic()` of the last change of state."""
    awaited: bool = False
    """True if a quarantined server will be brought back, so that requests wait instead of failing."""
    software: str = ""
    """Version that the server reports, such as "0.5.20"; empty if it reports none."""
    weight_version: int | None = None
    """Version of the last weight update known to be complete; None while it serves the weights loaded at its start."""
    loaded: tuple[int | None, str] | None = None
    """Version wanted and model path reported at the last comparison; None if it has loaded weights since."""
    busy: int = 0
    """Number of requests of this run in flight."""
    progress: float = 0.0
    """`time.monotonic()` of the last answer or part of an answer; a busy server that answers is not hung."""


class WorkerPool:
    """The workers of one model."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        self.version_wanted: int | None = None
        """Weight version that every ready worker serves; None before the first update."""
        self.version_coming: int | None = None
        """Weight version of the update in progress, which some workers serve already; None without one."""
        self.update_lock = threading.Lock()
        """Lock held while weights are pushed and while a worker is brought back, so that these never overlap."""
        self.paused = False
        """True while generation is paused or the servers' memory is released, so that requests would wait."""
        self.pause_mode: str | None = None
        """Mode in which the engine's caller paused generation; None: it did not."""
        self.interruptions = 0
        """Number of times that a weight update was about to end requests that no caller had aborted."""
        self._workers = list(workers)
        self._lock = threading.Lock()
        self._sessions: OrderedDict[str, Worker] = OrderedDict()
        self._listeners: list[Callable[[Worker], None]] = []

    @property
    def workers(self) -> list[Worker]:
        """All workers."""
        with self._lock:
            return list(self._workers)

    @property
    def ready(self) -> list[Worker]:
        """Workers that may get requests."""
        with self._lock:
            return [w for w in self._workers if w.state is WorkerState.READY]

    @property
    def recovering(self) -> bool:
        """True if a worker that is out will be brought back, so waiting is useful."""
        return any(w.awaited and w.state is not WorkerState.LOST for w in self.workers)

    def on_change(self, listener: Callable[[Worker], None]) -> None:
        """Register `listener`, which is called after each change of state, in the thread of the change."""
        self._listeners.append(listener)

    def set_state(self, worker: Worker, state: WorkerState, reason: str = "") -> None:
        """Set the state of a worker unless it is lost: take it out of the pool or put it back."""
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
        """Hold `update_lock`, and wait for it without blocking this event loop if another thread holds it.

        Raises `late` after `seconds` seconds.
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
        """Count that an update is about to end requests, so that their waiters can continue them."""
        with self._lock:
            self.interruptions += 1

    def acquire(self, session_id: str | None = None, *, avoid: Collection[Worker] = ()) -> Worker:
        """Return the session's worker if it is ready, else the least busy worker; count a request until `release`.

        Args:
            session_id: Session of the request; all its requests go to the same worker while it is ready.
            avoid: Workers that failed this request; used only if no other worker is ready.

        Raises:
            EngineError: No worker is ready; the message has the state of each.
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
        """End the request that `acquire` counted."""
        with self._lock:
            worker.busy -= 1

    def progressed(self, worker: Worker) -> None:
        """Record that an answer, or a part of an answer, came from the worker."""
        worker.progress = time.monotonic()

    def describe(self) -> str:
        """Return the state of each worker, for messages."""
        if not self._workers:
            return "none was found"
        return "; ".join(map(_describe, self._workers))


def _describe(worker: Worker) -> str:
    if worker.state is WorkerState.LOST:
        return f"{worker.url} {worker.reason}"
    return f"{worker.url} {worker.state.value}{f' ({worker.reason})' if worker.reason else ''}"
