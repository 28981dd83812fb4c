"""The watch on a server that answers requests for tokens: does it answer, generate, and serve the weights it should?

Asked at every beat, over the supervisor's own connections. Slow is not dead: a server in the middle of a long prefill
answers no health request, so a refusal is asked again until the whole timeout has passed, and any answer that a client
of ours got meanwhile counts as a sign of life. While weights are pushed or generation is paused it cannot generate and
may have either version, so only its HTTP process must answer.
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
from slime_engine_sglang import servers
from slime_engine_sglang.api.router import Router
from slime_engine_sglang.api.transport import MODEL_INFO, Http
from slime_engine_sglang.api.worker import Worker, WorkerState
from slime_engine_sglang.incidents import Incidents
from slime_engine_sglang.servers import Supervised, Told, Watch, WeightsNotKept

logger = logging.getLogger(__name__)
T = TypeVar("T")

UPDATE_WAIT_S = 1800.0
"""Longest wait for a weight update that is under way."""
_AGAIN_S = 0.25
"""Between two questions of one look."""
_POLL_S = 0.05
_GO_ON = "Start it again"


class OtherWeightsError(EngineError):
    """It answers, but with other weights than wanted: catching up may be enough."""


class WorkerWatch(Watch):
    """Of ours, or of another's."""

    told = Told("", "restart_failed", "restarted", "lost")  # listeners of the pool tell "quarantined"

    def __init__(
        self, model: Supervised, worker: Worker, router: Router | None, http: Http, args: Args, incidents: Incidents
    ) -> None:
        super().__init__(model.name_of(worker), model.servers.get(worker), args, incidents)
        self._model, self._pool, self._worker, self._router, self._http = model, model.pool, worker, router, http
        self.timeout = float(args.rollout_health_check_timeout)
        """Seconds that it has to answer."""
        if not self.tolerant:
            self.timeout = min(self.timeout, servers.COMEBACK_S / 2)
        if self.process is None:
            self.told = Told("", "", "readmitted", "lost")
            self.pause = tenacity.wait_fixed(args.rollout_health_check_interval if self.tolerant else servers.TICK_S)

    @property
    def url(self) -> str:
        """The worker's."""
        return self._worker.url

    def problem(self) -> str:
        """That somebody took it out, or that its process has ended."""
        if self._worker.state is WorkerState.QUARANTINED:
            return self._worker.reason or "taken out"
        return super().problem()

    # -- a look --------------------------------------------------------------------------------------------

    async def look(self) -> str:
        """Takes at most twice the timeout."""
        try:
            await self.ask()
        except OtherWeightsError:
            # An update may have passed between its answer and now, so it is asked again while none can.
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
        """Everything. Raises OtherWeightsError; EngineError: it does not answer, or does not generate."""

        async def generate(left: float) -> None:
            await self._http.send("GET", self.url, "/health_generate", timeout=left, attempts=1)

        await self.ask_weights()
        if not self._unsure():
            await self._persists(generate, self._unsure)

    async def ask_weights(self, *, locked: bool = False) -> None:
        """Whether the HTTP process answers, with the version wanted and the model path of before.

        The first is asked of it also during an update, which keeps its scheduler busy and not this process.

        Args:
            locked: The caller holds the pool's update lock, so no update can explain other weights.

        Raises:
            OtherWeightsError: It serves others.
            EngineError: It does not answer.
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
        """`ask` until it raises nothing; what it raises when the time is up. None: there is another sign of life."""
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
        """Whether silence means nothing now: weights are being pushed, or generation is paused."""
        return self._pool.paused or self._pool.update_lock.locked()

    # -- out, and back -------------------------------------------------------------------------------------

    async def out(self, reason: str) -> float:
        """Nothing new goes there; the router forgets it, and one that does not answer has nobody to send there."""
        if self._worker.state is WorkerState.READY:
            self._pool.set_state(self._worker, WorkerState.QUARANTINED, super().problem() or reason)
        if self._router is not None:
            try:
                await self._router.remove_worker(self.url)
            except EngineError as error:
                self.tell("router_refused", str(error))
        return self._worker.since

    async def again(self) -> None:
        """Restart it, or find out whether it answers again; then bring it to the current version and let requests go
        to it.

        The update lock is held from the catching up on, or an update could pass it by.

        Raises:
            EngineError, WeightSyncError: It did not take the weights, or serves others; it stays out.
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
        """Whether one that is not ours, of which nobody asks anything, answers again. Raises EngineError.

        One that failed in the middle of an update was left paused, and a paused one cannot show that it generates.
        """
        if not self._unsure():
            await self._http.send("POST", self.url, "/continue_generation", {}, timeout=self.timeout, accept=(404,))
        try:
            await self.ask()
        except OtherWeightsError:
            return

    async def _unpaused(self) -> None:
        """The trainer may have the memory that a server would take, and one that comes back now would not be paused."""
        while self._pool.paused:
            await asyncio.sleep(_POLL_S)

    def failed(self, reason: str) -> None:
        """The reason is shown to whoever finds no server."""
        if self.process is not None:
            self._pool.set_state(self._worker, WorkerState.QUARANTINED, reason)
            super().failed(reason)
        else:
            logger.debug("%s stays out: %s", self.url, reason)

    async def lose(self, error: Exception | None) -> None:
        """Whoever waits for it goes on without it."""
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
