"""The watch over a server that answers generation requests: does it answer, generate, and serve the wanted weights?

The check runs at every beat, over the supervisor's own connections. A slow server is not dead: in the middle of a long
prefill it answers no health request. A failed check is therefore repeated until the whole timeout has passed, and any
answer that one of slime's clients gets meanwhile counts as a sign of life. While weights are pushed or generation is
paused, the server cannot generate and may have either version, so only its HTTP process must answer.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import tenacity

from slime_core.errors import EngineError
from slime_core.protocols import Args
from slime_engine_http import servers
from slime_engine_http.api.router import Router
from slime_engine_http.api.transport import MODEL_INFO, Http
from slime_engine_http.api.worker import Worker, WorkerState
from slime_engine_http.incidents import Incidents
from slime_engine_http.servers import Supervised, Told, Watch, WeightsNotKept

logger = logging.getLogger(__name__)
T = TypeVar("T")

UPDATE_WAIT_S = 1800.0
"""Longest wait, in seconds, for a weight update in progress."""
_AGAIN_S = 0.25
"""Seconds between two requests of a check."""
_POLL_S = 0.05
_GO_ON = "Start it again"


class OtherWeightsError(EngineError):
    """A server answers, but serves other weights than wanted; sending it the current weights may be enough."""


class WorkerWatch(Watch):
    """A watch over a worker, either slime's own server or an external one."""

    told = Told("", "restart_failed", "restarted", "lost")  # listeners of the pool tell "quarantined"

    def __init__(
        self, model: Supervised, worker: Worker, router: Router | None, http: Http, args: Args, incidents: Incidents
    ) -> None:
        super().__init__(model.name_of(worker), model.servers.get(worker), args, incidents)
        self._model, self._pool, self._worker, self._router, self._http = model, model.pool, worker, router, http
        self.timeout = float(args.rollout_health_check_timeout)
        """Seconds within which the worker must answer."""
        if not self.tolerant:
            self.timeout = min(self.timeout, servers.COMEBACK_S / 2)
        if self.process is None:
            self.told = Told("", "", "readmitted", "lost")
            self.pause = tenacity.wait_fixed(args.rollout_health_check_interval if self.tolerant else servers.TICK_S)

    @property
    def url(self) -> str:
        """URL of the worker."""
        return self._worker.url

    def problem(self) -> str:
        """Return the reason if the worker was quarantined or its process has ended."""
        if self._worker.state is WorkerState.QUARANTINED:
            return self._worker.reason or "taken out"
        return super().problem()

    # -- a look --------------------------------------------------------------------------------------------

    async def look(self) -> str:
        """Check the worker, in at most twice the timeout; return the problem, or an empty string."""
        try:
            await self.ask()
        except OtherWeightsError:
            # An update may have finished since the answer, so ask again while the lock prevents updates.
            if self._pool.update_lock.acquire(blocking=False):
                try:
                    await self.ask_weights(locked=True)
                except EngineError as error:
                    return str(error)
                finally:
                    self._pool.update_lock.release()
        except EngineError as error:
            return str(error)
        return ""

    async def ask(self) -> None:
        """Check weights and generation.

        Raises:
            OtherWeightsError: The worker serves other weights.
            EngineError: The worker does not answer, or does not generate.
        """

        async def generate(left: float) -> None:
            await self._http.send("GET", self.url, "/health_generate", timeout=left, attempts=1)

        await self.ask_weights()
        if not self._unsure():
            await self._persists(generate, self._unsure)

    async def ask_weights(self, *, locked: bool = False) -> None:
        """Check that the HTTP process answers with the wanted version and an unchanged model path.

        The process must answer during an update too, since an update occupies the scheduler and not the HTTP process.

        Args:
            locked: Whether the caller holds the pool's update lock, so that no update can explain other weights.

        Raises:
            OtherWeightsError: The worker serves other weights.
            EngineError: The worker does not answer.
        """

        async def tell(left: float) -> dict[str, Any]:
            answer = await self._http.send("GET", self.url, MODEL_INFO, timeout=left, attempts=1)
            if not (found := answer.object()):
                raise EngineError(f"{self.url}{MODEL_INFO}: no JSON object")
            return found

        wanted = self._pool.version_wanted
        told = await self._persists(tell, lambda: False)
        if told is None or wanted != self._pool.version_wanted or (self._unsure() and not locked):
            return
        version, path = told.get("weight_version"), str(told.get("model_path", ""))
        if wanted is not None and str(version) != str(wanted):
            raise OtherWeightsError(f"serves weight version {version!r}, wanted is {wanted}")
        known = self._worker.loaded
        if known is None or known[0] != wanted:  # an update from disk moves the path along with the version
            self._worker.loaded = (wanted, path)
        elif known[1] != path:
            raise OtherWeightsError(f"serves {path}, it was {known[1]}")

    async def _persists(self, ask: Callable[[float], Awaitable[T]], excused: Callable[[], bool]) -> T | None:
        """Repeat `ask` until it succeeds, and return its result; None if the worker shows another sign of life.

        Raises the last error when the timeout has passed.
        """
        began = time.monotonic()
        while True:
            try:
                return await ask(max(began + self.timeout - time.monotonic(), 0.05))
            except EngineError as error:
                if self._worker.progress > began or excused():
                    return None
                if self.process is not None and not self.process.alive:
                    raise EngineError("its process ended") from None
                if time.monotonic() + _AGAIN_S >= began + self.timeout:
                    late = f"asked for {self.timeout:g} s (--rollout-health-check-timeout)"
                    raise EngineError(f"{error}; {late}") from None
            await asyncio.sleep(_AGAIN_S)

    def _unsure(self) -> bool:
        """Return whether a missing answer proves nothing: weights are being pushed, or generation is paused."""
        return self._pool.paused or self._pool.update_lock.locked()

    # -- out, and back -------------------------------------------------------------------------------------

    async def out(self, reason: str) -> float:
        """Send no new requests to the worker, and remove it from the router; a failure of the router is reported only.

        A router that does not answer sends no requests to the worker either. Returns the time since when it is out.
        """
        if self._worker.state is WorkerState.READY:
            self._pool.set_state(self._worker, WorkerState.QUARANTINED, super().problem() or reason)
        if self._router is not None:
            try:
                await self._router.remove_worker(self.url)
            except EngineError as error:
                self.tell("router_refused", str(error))
        return self._worker.since

    async def again(self) -> None:
        """Restart the worker, or check that it answers again; then send the current weights and admit requests.

        The update lock is held while the worker catches up, so that it misses no update.

        Raises:
            EngineError, WeightSyncError: The worker did not take the weights, or serves others; it stays out.
        """
        pool, worker, catch_up = self._pool, self._worker, self._model.catch_up
        await self._unpaused()
        if self.process is None:
            await self._goes_on()
        else:
            await self.restart(self.process)
            worker.url, worker.weight_version, worker.loaded = self.process.url, None, None
        await self._unpaused()
        late = EngineError(f"waited {UPDATE_WAIT_S:.0f} s for the weight update that is under way")
        async with pool.updating(UPDATE_WAIT_S, late):
            lie: EngineError | None = None
            try:
                if self.process is None and not pool.paused:
                    await self._resume()
                await self.ask_weights(locked=True)
            except OtherWeightsError as error:
                lie = error
            unsure = self.tolerant or lie is not None or worker.weight_version != pool.version_wanted
            if catch_up is not None and pool.version_wanted is not None and unsure:
                await catch_up(worker)
                worker.loaded = None
                await self.ask_weights(locked=True)
            elif lie is not None:
                raise lie
            worker.weight_version = pool.version_wanted
            pool.set_state(worker, WorkerState.READY)
        if self._router is not None:
            try:
                await self._router.add_worker(worker)
            except EngineError as error:  # the watch on the router adds it later; until then it is asked directly
                self.tell("router_refused", str(error))

    async def _goes_on(self) -> None:
        """Check that an external worker that receives no requests answers again. Raises EngineError if it does not.

        A worker that failed in the middle of an update was left paused, and a paused worker cannot generate. Generation
        is therefore continued first.
        """
        if not self._unsure():
            await self._resume()
        try:
            await self.ask()
        except OtherWeightsError:
            return

    async def _resume(self) -> None:
        await self._http.send("POST", self.url, "/continue_generation", {}, timeout=self.timeout, accept=(404,))

    async def _unpaused(self) -> None:
        """Wait while generation is paused.

        During a pause the trainer may use the memory that a server would take, and a returning server would not be
        paused.
        """
        while self._pool.paused:
            await asyncio.sleep(_POLL_S)

    def failed(self, reason: str) -> None:
        """Record a failed attempt; a request that finds no server reports the reason."""
        if self.process is not None:
            self._pool.set_state(self._worker, WorkerState.QUARANTINED, reason)
            super().failed(reason)
        else:
            logger.debug("%s stays out: %s", self.url, reason)

    async def lose(self, error: Exception | None) -> None:
        """Mark the worker as lost, so that waiting requests continue without it; kill its process, if slime's own."""
        if self.process is not None:
            most = f"{self.args.rollout_max_engine_restarts} restarts (--rollout-max-engine-restarts)"
            reason = f"out for good after {most}: {self._worker.reason}"
        elif isinstance(error, WeightsNotKept):
            reason = f"{error}. {_GO_ON}"
        else:
            waited = f"it has not come back within {servers.COMEBACK_S:.0f} s"
            reason = f"is gone: {waited} ({self._worker.reason}). {_GO_ON}"
        self._pool.set_state(self._worker, WorkerState.LOST, reason)
        self.tell(self.told.lost, reason)
        if self.process is not None:
            await asyncio.to_thread(self.process.kill)
