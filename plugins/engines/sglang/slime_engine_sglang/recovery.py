"""A server that is dead, hung or lying -> the same worker, restarted, with the current weights, in service again.

    quarantined -> out of the router -> killed -> (back-off) -> started -> ready
                -> [update lock: caught up -> version checked -> READY] -> into the router

The supervisor runs one recovery per worker at a time. What a reader would get wrong: a restarted server serves the
checkpoint it was started with, so nothing may reach it before it was caught up, and the update lock is held from the
catching up until it is READY, or a weight update could pass it by in between.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from slime_core.errors import EngineError, WeightSyncError
from slime_engine_sglang.api.worker import Worker, WorkerPool, WorkerState

if TYPE_CHECKING:
    from slime_engine_sglang.api.router import Router
    from slime_engine_sglang.heartbeat import Heartbeat
    from slime_engine_sglang.incidents import Incidents

UPDATE_WAIT_S = 1800.0
"""Longest wait for a weight update that is under way."""
_FIRST_DELAY_S, _LONGEST_DELAY_S = 1.0, 60.0
_POLL_S = 0.05


class Process(Protocol):
    """A server or a router that we launched; what blocks is called in a thread."""

    @property
    def name(self) -> str:
        """For logs and events."""

    @property
    def url(self) -> str:
        """http://HOST:PORT; may be another one after `start`."""

    @property
    def alive(self) -> bool:
        """Whether it has not ended; one that was stopped by a signal is alive."""

    def last_words(self) -> str:
        """How it ended, and the end of its log."""

    def kill(self) -> None:
        """End it and its children by force; returns when they are gone. Raises EngineError."""

    async def restart(self) -> None:
        """`kill`, start anew, and wait until it is ready. Raises EngineError."""


class RouterLike(Process, Protocol):
    """The router's process; it keeps its address."""

    def start_with(self, urls: Sequence[str]) -> None:
        """Workers for its next start, which it may need to begin at all."""


@dataclass
class Supervised:
    """One model: its workers and what stands behind them."""

    name: str
    pool: WorkerPool
    servers: Mapping[Worker, Process]
    """Of the workers we own."""
    router_url: str | None = None
    router_process: RouterLike | None = None
    """Of the router that we launched; it keeps its address when it is restarted."""
    catch_up: Callable[[Worker], Awaitable[None]] | None = None
    """Gives a worker the weights of `pool.version_wanted`; None for a model that is never updated."""
    companions: Sequence[Process] = ()
    """Servers of ours that answer no requests for tokens: encoders, further nodes of an engine."""
    lost: set[Worker] = field(default_factory=set)
    """Workers that stay out for the rest of the run."""
    out_since: dict[Worker, float] = field(default_factory=dict)
    """`time.monotonic()` of the last time that each was taken out."""

    def name_of(self, worker: Worker) -> str:
        """For logs and events."""
        return self.servers[worker].name if worker in self.servers else f"external server of {self.name}"


class Recovery:
    """Brings workers of one model back."""

    def __init__(
        self,
        model: Supervised,
        heartbeat: Heartbeat,
        incidents: Incidents,
        router: Router | None,
        max_restarts: int,
    ) -> None:
        self._model = model
        self._router = router
        self._heartbeat = heartbeat
        self._incidents = incidents
        self._max_restarts = max_restarts
        self._restarts: dict[Worker, int] = {}

    async def restart(self, worker: Worker, server: Process) -> None:
        """Until the worker is READY, or its restarts are used up and it stays out."""
        model, failures = self._model, 0
        while True:
            await self.out_of_router(worker)
            if self._restarts.get(worker, 0) >= self._max_restarts:
                reason = f"out for good after {self._max_restarts} restarts (--rollout-max-engine-restarts)"
                self._give_up(worker, f"{reason}: {worker.reason}")
                await asyncio.to_thread(server.kill)
                return
            await asyncio.sleep(min(_FIRST_DELAY_S * 2 ** (failures - 1), _LONGEST_DELAY_S) if failures else 0.0)
            await self._unpaused()
            self._restarts[worker] = self._restarts.get(worker, 0) + 1
            try:
                await server.restart()
                worker.url, worker.weight_version = server.url, None
                self._heartbeat.forget(worker)
                await self.readmit(worker)
            except (EngineError, WeightSyncError) as error:
                failures += 1
                model.pool.set_state(worker, WorkerState.QUARANTINED, str(error))
                self._incidents.tell("restart_failed", server.name, worker.url, str(error))
                continue
            self._incidents.tell(
                "restarted", server.name, worker.url, seconds=time.monotonic() - model.out_since[worker]
            )
            return

    async def readmit(self, worker: Worker) -> None:
        """Bring it to the current version, check that, and let requests go to it.

        Raises:
            EngineError, WeightSyncError: It did not take the weights, or serves others; it stays out.
        """
        model = self._model
        await self._unpaused()
        async with _held(model.pool.update_lock, "the weight update that is under way"):
            finding = await self._heartbeat.weights(model.pool, worker, locked=True)
            if model.catch_up is not None and model.pool.version_wanted is not None:
                if finding.reason and not finding.lying:
                    raise EngineError(f"{worker.url} {finding.reason}")
                await model.catch_up(worker)
                self._heartbeat.forget(worker)
                finding = await self._heartbeat.weights(model.pool, worker, locked=True)
            if finding.reason:
                raise WeightSyncError(f"{worker.url} {finding.reason}")
            worker.weight_version = model.pool.version_wanted
            model.pool.set_state(worker, WorkerState.READY)
        if self._router is not None:
            try:
                await self._router.add_worker(worker)
            except EngineError as error:  # the watch on the router adds it later; until then it is asked directly
                self._incidents.tell("router_refused", model.name_of(worker), worker.url, str(error))

    async def _unpaused(self) -> None:
        """The trainer may have the memory that a server would take, and one that comes back now would not be paused."""
        while self._model.pool.paused:
            await asyncio.sleep(_POLL_S)

    async def out_of_router(self, worker: Worker) -> None:
        """Have the router forget it; a router that does not answer has nobody to send there."""
        if self._router is None:
            return
        try:
            await self._router.remove_worker(worker.url)
        except EngineError as error:
            self._incidents.tell("router_refused", self._model.name_of(worker), worker.url, str(error))

    def _give_up(self, worker: Worker, reason: str) -> None:
        self._model.lost.add(worker)
        self._model.pool.set_state(worker, WorkerState.QUARANTINED, reason)
        self._incidents.tell("lost", self._model.name_of(worker), worker.url, reason)


@asynccontextmanager
async def _held(lock: threading.Lock, name: str) -> AsyncIterator[None]:
    """The lock, waited for without blocking the event loop. Raises EngineError after UPDATE_WAIT_S."""
    deadline = time.monotonic() + UPDATE_WAIT_S
    while not lock.acquire(blocking=False):
        if time.monotonic() > deadline:
            raise EngineError(f"waited {UPDATE_WAIT_S:.0f} s for {name}")
        await asyncio.sleep(_POLL_S)
    try:
        yield
    finally:
        lock.release()
