"""Life cycle of a server or router: watched, out, restored, lost. One state machine for four kinds of services.

    WATCHED --(its process ended | it hangs | other weights | it was taken out elsewhere)--> OUT
    OUT --(ours: restarted | not ours: it answers again)--> caught up, version checked --> WATCHED
     '--(its restarts, or the patience with it, are used up)--> LOST

`supervisor` runs one `Watch` for each service. Without `--use-fault-tolerance` nothing is restarted: the end of an own
process is only reported, and an external server is waited for, for a minute. A restarted server serves the checkpoint
that it was started with, so no request may reach it before it has caught up. The update lock is held from the catch-up
until the server is READY; otherwise it could miss a weight update in between.
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
from slime_engine_http.api.router import Router
from slime_engine_http.api.transport import Http
from slime_engine_http.api.worker import Worker, WorkerPool
from slime_engine_http.incidents import Incidents
from slime_engine_http.service import Service

TICK_S = 0.5
"""Seconds between two checks that a process is alive."""
COMEBACK_S = 60.0
"""Seconds to wait for a silent external server without `--use-fault-tolerance`."""


class RouterService(Service):
    """A router that this run launched."""

    @abstractmethod
    def start_with(self, urls: Sequence[str]) -> None:
        """Set the workers for the next start, for policies that need them; otherwise they are added later."""


class WeightsNotKept(WeightSyncError):
    """A server lacks weights that are no longer kept; a retry cannot help."""


@dataclass
class Supervised:
    """A supervised model: its workers and the processes behind them."""

    name: str
    pool: WorkerPool
    servers: Mapping[Worker, Service]
    """Services of the workers that this run started."""
    router_url: str | None = None
    router_process: RouterService | None = None
    """Process of the router that this run launched; the router keeps its address when it is restarted."""
    catch_up: Callable[[Worker], Awaitable[None]] | None = None
    """Sends a worker the weights of `pool.version_wanted`; None for a model that is never updated."""
    companions: Sequence[Service] = ()
    """Own servers that do not generate tokens: encoders, further nodes of an engine."""

    def name_of(self, worker: Worker) -> str:
        """Return the worker's name for logs and events."""
        return self.servers[worker].name if worker in self.servers else f"external server of {self.name}"


class Told(NamedTuple):
    """Names of the events of a `Watch`; an empty name is not reported."""

    out: str
    failed: str
    back: str
    lost: str


class Watch(ABC):
    """The state machine of a service; subclasses define how to check the service and how to restore it."""

    told: Told
    pause: Any = tenacity.wait_exponential(multiplier=1.0, max=60.0)
    """Wait between two attempts to restore the service."""

    def __init__(self, name: str, process: Service | None, args: Args, incidents: Incidents) -> None:
        """Create the watch. `process`: process to restart; None for an external service."""
        self.name, self.process, self.args = name, process, args
        self.tolerant = bool(args.use_fault_tolerance)
        self.wake = asyncio.Event()
        """Set when the service's state may have changed, to check it at once."""
        self._incidents = incidents
        self._restarts_left = args.rollout_max_engine_restarts

    async def run(self) -> None:
        """Watch the service until it is lost; cancel to stop."""
        while True:
            reason = await self._failure()
            began = await self.out(reason)
            if not await self._comes_back(began):
                return

    async def _failure(self) -> str:
        """Wait until the service fails and return the reason."""
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
        """Record an incident of this service."""
        if event:
            self._incidents.tell(event, self.name, self.url, reason, seconds)

    def _failed(self, state: tenacity.RetryCallState) -> None:
        assert state.outcome is not None
        self.failed(str(state.outcome.exception()))

    def failed(self, reason: str) -> None:
        """Record a failed attempt to restore the service."""
        self.tell(self.told.failed, reason)

    async def restart(self, process: Service) -> None:
        """Restart the process and count the restart. Raises EngineError."""
        self._restarts_left -= 1
        await process.restart()

    def is_urgent(self) -> bool:
        """Return whether a client that could not reach the service requested a check."""
        return False

    # -- what a kind says ----------------------------------------------------------------------------------

    @property
    @abstractmethod
    def url(self) -> str:
        """URL of the service."""

    def problem(self) -> str:
        """Return the problem that is known without a request to the service; empty if none."""
        return "" if self.process is None or self.process.alive else self.process.last_words()

    @abstractmethod
    async def look(self) -> str:
        """Send a health request to the service and return its problem; empty if none."""

    async def out(self, reason: str) -> float:
        """Handle a failure and return when it began, by `time.monotonic()`."""
        self.tell(self.told.out, reason)
        return time.monotonic()

    @abstractmethod
    async def again(self) -> None:
        """Try once to restore the service. Raises EngineError, WeightSyncError."""

    async def lose(self, error: Exception | None) -> None:
        """Give the service up: it stays out. `error`: error of the last attempt."""
        self.tell(self.told.lost, "its restarts are used up (--rollout-max-engine-restarts)")
        if self.process is not None:
            await asyncio.to_thread(self.process.kill)


def _may_pass(error: BaseException) -> bool:
    return isinstance(error, EngineError | WeightSyncError) and not isinstance(error, WeightsNotKept)


class CompanionWatch(Watch):
    """Watch of a server that other servers need and that does not generate tokens: encoders, further nodes.

    Its failure quarantines no other server: a server whose companion is gone fails its requests or its own heartbeat.
    """

    told = Told("companion_failed", "restart_failed", "restarted", "lost")
    process: Service

    def __init__(self, process: Service, http: Http, args: Args, incidents: Incidents) -> None:
        super().__init__(process.name, process, args, incidents)
        self._http = http

    @property
    def url(self) -> str:
        """URL of the process."""
        return self.process.url

    async def look(self) -> str:
        """Check that the server is ready; it has no trained weights to compare."""
        timeout = self.args.rollout_health_check_timeout
        try:
            await self._http.send("GET", self.url, "/health", timeout=timeout)
        except EngineError as error:
            return f"{error}; asked for {timeout:g} s (--rollout-health-check-timeout)"
        return ""

    async def again(self) -> None:
        """Restart the server."""
        await self.restart(self.process)


class RouterWatch(Watch):
    """Watch of a router that this run launched. While it is out, requests go to the servers directly.

    A router that was down missed changes of the workers, so each check compares its list of workers with the pool.
    """

    told = Told("router_failed", "router_restart_failed", "router_restarted", "router_lost")
    process: RouterService

    def __init__(
        self, model: Supervised, process: RouterService, router: Router, args: Args, incidents: Incidents
    ) -> None:
        super().__init__(process.name, process, args, incidents)
        self._pool, self._router = model.pool, router
        self.hurry = False
        """True after a client could not reach the router."""

    @property
    def url(self) -> str:
        """URL of the router, the same for the whole run."""
        return self._router.url

    def is_urgent(self) -> bool:
        """Return True once for each time that a client could not reach the router."""
        urgent, self.hurry = self.hurry, False
        return urgent

    async def look(self) -> str:
        """Check the router and, if it answers, set its workers to those of the pool."""
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
        except EngineError as error:  # the next check retries; until then requests go to that server directly
            self.tell("router_refused", str(error))

    async def again(self) -> None:
        """Restart the router and register every ready server with it."""
        self.process.start_with([worker.url for worker in self._pool.ready])
        await self.restart(self.process)
        await self._correct(set())

    async def lose(self, error: Exception | None) -> None:
        """Report that the router is lost; the run continues without it."""
        reason = "its restarts are used up (--rollout-max-engine-restarts); requests go to the servers directly"
        self.tell(self.told.lost, reason)
