"""The life of one server or router: watched, out, brought back, lost. One state machine, four kinds of what is watched.

    WATCHED --(its process ended | it hangs | other weights | somebody else took it out)--> OUT
    OUT --(ours: restarted | not ours: it answers again)--> caught up, version checked --> WATCHED
     '--(its restarts, or the patience with it, are used up)--> LOST

`supervisor` runs one `Watch` for each. Without `--use-fault-tolerance` nothing is restarted: what is ours and ends is
only told of, and what is not ours is waited for, for a minute. A restarted server serves the checkpoint it was started
with, so nothing may reach it before it was caught up, and the update lock is held from the catching up until it is
READY, or a weight update could pass it by in between.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import tenacity
from tenacity import AsyncRetrying, retry_if_exception, stop_after_attempt, stop_after_delay, stop_never

from slime_core.errors import EngineError, WeightSyncError
from slime_core.protocols import Args
from slime_engine_sglang.api.router import Router
from slime_engine_sglang.api.transport import Http
from slime_engine_sglang.api.worker import Worker, WorkerPool
from slime_engine_sglang.incidents import Incidents
from slime_engine_sglang.programs import RouterProcess
from slime_engine_sglang.service import Service

TICK_S = 0.5
"""Between two looks at whether a process still lives."""
COMEBACK_S = 60.0
"""An external server that is silent is waited for so long without `--use-fault-tolerance`."""


class WeightsNotKept(WeightSyncError):
    """A server lacks weights that nobody has any more; asking again will not help."""


@dataclass
class Supervised:
    """One model: its workers and what stands behind them."""

    name: str
    pool: WorkerPool
    servers: Mapping[Worker, Service]
    """Of the workers we own."""
    router_url: str | None = None
    router_process: RouterProcess | None = None
    """Of the router that we launched; it keeps its address when it is restarted."""
    catch_up: Callable[[Worker], Awaitable[None]] | None = None
    """Gives a worker the weights of `pool.version_wanted`; None for a model that is never updated."""
    companions: Sequence[Service] = ()
    """Servers of ours that answer no requests for tokens: encoders, further nodes of an engine."""

    def name_of(self, worker: Worker) -> str:
        """For logs and events."""
        return self.servers[worker].name if worker in self.servers else f"external server of {self.name}"


class Told(NamedTuple):
    """Names of events; empty: it is not told."""

    out: str
    failed: str
    back: str
    lost: str


class Watch(ABC):
    """The machine; subclasses say what is looked at, and what brings it back."""

    told: Told
    pause: Any = tenacity.wait_exponential(multiplier=1.0, max=60.0)
    """Between two attempts to bring it back."""

    def __init__(self, name: str, process: Service | None, args: Args, incidents: Incidents) -> None:
        """`process`: what is restarted; None: it is not ours."""
        self.name, self.process, self.args = name, process, args
        self.tolerant = bool(args.use_fault_tolerance)
        self.wake = asyncio.Event()
        """Set when something about it changed: look whether it is out."""
        self._incidents = incidents
        self._restarts_left = args.rollout_max_engine_restarts

    async def run(self) -> None:
        """Until it is lost; cancel it to stop."""
        while True:
            reason = await self._failure()
            began = await self.out(reason)
            if not await self._comes_back(began):
                return

    async def _failure(self) -> str:
        """What was found to be wrong with it."""
        interval = self.args.rollout_health_check_interval
        next_look = time.monotonic() + max(self.args.rollout_health_check_first_wait, interval)
        while True:
            if reason := self.problem():
                return reason
            if self.tolerant and (self.is_urgent() or time.monotonic() >= next_look):
                if reason := await self.look():
                    return reason
                next_look = time.monotonic() + interval
            try:
                async with asyncio.timeout(TICK_S):
                    await self.wake.wait()
            except TimeoutError:
                continue
            self.wake.clear()

    async def _comes_back(self, began: float) -> bool:
        patience: Any = stop_after_delay(COMEBACK_S)
        if self.tolerant:
            patience = stop_never if self.process is None else stop_after_attempt(self._restarts_left)
        elif self.process is not None:
            return False
        error: Exception | None = None
        if self.process is None or self._restarts_left:
            attempts = AsyncRetrying(
                stop=patience, wait=self.pause, retry=retry_if_exception(_may_pass), after=self._failed, reraise=True
            )
            try:
                await attempts(self.again)
            except (EngineError, WeightSyncError) as last:
                error = last
            else:
                self.tell(self.told.back, seconds=time.monotonic() - began)
                return True
        await self.lose(error)
        return False

    def tell(self, event: str, reason: str = "", seconds: float | None = None) -> None:
        """Of this one."""
        if event:
            self._incidents.tell(event, self.name, self.url, reason, seconds)

    def _failed(self, state: tenacity.RetryCallState) -> None:
        assert state.outcome is not None
        self.failed(str(state.outcome.exception()))

    def failed(self, reason: str) -> None:
        """An attempt to bring it back was of no use."""
        self.tell(self.told.failed, reason)

    async def restart(self, process: Service) -> None:
        """One of its restarts. Raises EngineError."""
        self._restarts_left -= 1
        await process.restart()

    def is_urgent(self) -> bool:
        """Whether somebody who could not reach it has asked for a look."""
        return False

    # -- what a kind says ----------------------------------------------------------------------------------

    @property
    @abstractmethod
    def url(self) -> str:
        """Where it answers."""

    def problem(self) -> str:
        """What is wrong with it, as far as that is known without asking it."""
        return "" if self.process is None or self.process.alive else self.process.last_words()

    @abstractmethod
    async def look(self) -> str:
        """Ask it; what is wrong with it."""

    async def out(self, reason: str) -> float:
        """It failed; since when, by `time.monotonic()`."""
        self.tell(self.told.out, reason)
        return time.monotonic()

    @abstractmethod
    async def again(self) -> None:
        """One attempt to bring it back. Raises EngineError, WeightSyncError."""

    async def lose(self, error: Exception | None) -> None:
        """It stays out. `error`: of the last attempt."""
        self.tell(self.told.lost, "its restarts are used up (--rollout-max-engine-restarts)")
        if self.process is not None:
            await asyncio.to_thread(self.process.kill)


def _may_pass(error: BaseException) -> bool:
    return isinstance(error, EngineError | WeightSyncError) and not isinstance(error, WeightsNotKept)


class CompanionWatch(Watch):
    """A server that answers no request for tokens and without which others do not work: encoders, further nodes.

    Nobody is quarantined for it: a server whose companion is gone fails its requests or its own heartbeat.
    """

    told = Told("companion_failed", "restart_failed", "restarted", "lost")
    process: Service

    def __init__(self, process: Service, http: Http, args: Args, incidents: Incidents) -> None:
        super().__init__(process.name, process, args, incidents)
        self._http = http

    @property
    def url(self) -> str:
        """Its process's."""
        return self.process.url

    async def look(self) -> str:
        """It holds no trained weights that could be wrong, so ready is all it has to be."""
        timeout = self.args.rollout_health_check_timeout
        try:
            await self._http.send("GET", self.url, "/health", timeout=timeout)
        except EngineError as error:
            return f"{error}; asked for {timeout:g} s (--rollout-health-check-timeout)"
        return ""

    async def again(self) -> None:
        """Restart it."""
        await self.restart(self.process)


class RouterWatch(Watch):
    """A router that we launched. While it is away requests go to the servers directly, so nothing waits for it.

    One that was down missed who came and went, so its list of workers is compared at every look, and not kept by
    counting.
    """

    told = Told("router_failed", "router_restart_failed", "router_restarted", "router_lost")
    process: RouterProcess

    def __init__(
        self, model: Supervised, process: RouterProcess, router: Router, args: Args, incidents: Incidents
    ) -> None:
        super().__init__(process.name, process, args, incidents)
        self._pool, self._router = model.pool, router
        self.hurry = False
        """Somebody could not reach it."""

    @property
    def url(self) -> str:
        """The same for the whole run."""
        return self._router.url

    def is_urgent(self) -> bool:
        """Asked once for each time that somebody could not reach it."""
        urgent, self.hurry = self.hurry, False
        return urgent

    async def look(self) -> str:
        """Makes its workers the pool's when nothing is wrong with it."""
        timeout = self.args.rollout_health_check_timeout
        try:
            async with asyncio.timeout(timeout):
                listed = await self._router.list_workers()
        except TimeoutError:
            return f"no answer within {timeout:g} s (--rollout-health-check-timeout)"
        except EngineError as error:
            return str(error)
        await self._correct(set(listed or ()))
        return ""

    async def _correct(self, listed: set[str]) -> None:
        ready = {worker.url: worker for worker in self._pool.ready}
        try:
            for url in listed - ready.keys():
                await self._router.remove_worker(url)
            for url in ready.keys() - listed:
                await self._router.add_worker(ready[url])
        except EngineError as error:  # the next look tries again; until then that server is asked directly
            self.tell("router_refused", str(error))

    async def again(self) -> None:
        """Restart it, and tell it of every ready server."""
        self.process.start_with([worker.url for worker in self._pool.ready])
        await self.restart(self.process)
        await self._correct(set())

    async def lose(self, error: Exception | None) -> None:
        """The run goes on without it."""
        reason = "its restarts are used up (--rollout-max-engine-restarts); requests go to the servers directly"
        self.tell(self.told.lost, reason)
