"""One look at a server: does it answer, does it generate, and does it serve the weights it should?

The supervisor asks at every beat, over its own HTTP connections. Slow is not dead. A server in the middle of a long
prefill answers no health request, so a refusal is asked again until the whole timeout has passed, and any answer that a
client of ours got meanwhile counts as a sign of life. While weights are pushed or generation is paused it cannot
generate and may have either version, so only its HTTP process must answer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from slime_core.errors import EngineError
from slime_engine_sglang.api.transport import MODEL_INFO, Http
from slime_engine_sglang.api.worker import Worker, WorkerPool

_AGAIN_S = 0.25
"""Between two questions of one look."""


@dataclass(frozen=True)
class Finding:
    """What is wrong with a server; `reason` is empty when nothing is."""

    reason: str = ""
    lying: bool = False
    """It answers, but with other weights than wanted: catching up may be enough."""


HEALTHY = Finding()


def _yes() -> bool:
    return True


def _no() -> bool:
    return False


class Heartbeat:
    """Looks at servers. `timeout`: seconds a server has to answer (--rollout-health-check-timeout)."""

    def __init__(self, http: Http, timeout: float) -> None:
        self._http = http
        self._timeout = timeout

    async def look(self, pool: WorkerPool, worker: Worker, alive: Callable[[], bool] = _yes) -> Finding:
        """HEALTHY, or what is wrong; takes at most twice the timeout. Ends early when `alive` turns False."""
        finding = await self.weights(pool, worker, alive)
        if finding.reason or unsure(pool):
            return finding
        return await self._persists(worker, lambda left: self._generates(worker, left), alive, lambda: unsure(pool))

    async def weights(
        self, pool: WorkerPool, worker: Worker, alive: Callable[[], bool] = _yes, *, locked: bool = False
    ) -> Finding:
        """Whether the HTTP process answers, with the version wanted and the model path of before.

        The first is asked of it also during an update, which keeps its scheduler busy and not this process.

        Args:
            pool: Of the worker.
            worker: Whom to ask.
            alive: Whether its process has not ended.
            locked: The caller holds the pool's update lock, so no update can explain other weights.
        """
        told: dict[str, Any] = {}

        async def ask(left: float) -> str:
            answer = await self._http.send("GET", worker.url, MODEL_INFO, timeout=left, attempts=1)
            told.update(answer.object())
            return "" if told else f"{worker.url}{MODEL_INFO}: no JSON object"

        wanted = pool.version_wanted
        finding = await self._persists(worker, ask, alive, _no)
        if finding.reason or not told or wanted != pool.version_wanted or (unsure(pool) and not locked):
            return finding
        return self._compare(worker, told, wanted)

    async def wake(self, pool: WorkerPool, worker: Worker) -> None:
        """Have a quarantined server generate again, of which nobody asks anything; raises EngineError when it is gone.

        One that failed in the middle of an update was left paused, and a paused one cannot show that it generates.
        """
        if not unsure(pool):
            await self._http.send("POST", worker.url, "/continue_generation", {}, timeout=self._timeout, accept=(404,))

    def _compare(self, worker: Worker, told: dict[str, Any], wanted: int | None) -> Finding:
        version, path = told.get("weight_version"), str(told.get("model_path", ""))
        if wanted is not None and str(version) != str(wanted):
            return Finding(f"serves weight version {version!r}, wanted is {wanted}", lying=True)
        known = worker.loaded
        if known is None or known[0] != wanted:  # an update from disk moves the path along with the version
            worker.loaded = (wanted, path)
        elif known[1] != path:
            return Finding(f"serves {path}, it was {known[1]}", lying=True)
        return HEALTHY

    async def _generates(self, worker: Worker, left: float) -> str:
        await self._http.send("GET", worker.url, "/health_generate", timeout=left, attempts=1)
        return ""

    async def _persists(
        self,
        worker: Worker,
        ask: Callable[[float], Awaitable[str]],
        alive: Callable[[], bool],
        excused: Callable[[], bool],
    ) -> Finding:
        """`ask` until it finds nothing wrong; what it finds when the time is up."""
        began = time.monotonic()
        while True:
            try:
                problem = await ask(max(began + self._timeout - time.monotonic(), 0.05))
            except EngineError as error:
                problem = str(error)
            if not problem or worker.progress > began or excused():
                return HEALTHY
            if not alive():
                return Finding("its process ended")
            if time.monotonic() + _AGAIN_S >= began + self._timeout:
                return Finding(f"{problem}; asked for {self._timeout:g} s (--rollout-health-check-timeout)")
            await asyncio.sleep(_AGAIN_S)


def unsure(pool: WorkerPool) -> bool:
    """Whether silence means nothing now: weights are being pushed, or generation is paused."""
    return pool.paused or pool.update_lock.locked()
