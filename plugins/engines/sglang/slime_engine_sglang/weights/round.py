"""One weight update as its servers see it: who takes part, and what becomes of a server that fails.

    for each phase:  all servers at once --> those that answered go on
                                         --> the others are QUARANTINED at once, with the reason, and drop out

Transports run their steps through `Round.each`; `update` opens and closes the round. A server that has taken part of an
update may serve any mixture of weights, so dropping out is never undone inside the round.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from slime_core.errors import EngineError, SlimeError, WeightSyncError
from slime_engine_sglang.api.transport import Http
from slime_engine_sglang.api.worker import Worker, WorkerPool, WorkerState
from slime_engine_sglang.weights.protocol import ServerFacts, WeightsRefused

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Round:
    """The servers that are being updated to `version`."""

    def __init__(
        self,
        http: Http,
        pool: WorkerPool,
        workers: list[Worker],
        *,
        version: int,
        transport: str,
        timeout: float,
        tolerant: bool,
        kept: bool = False,
        pause_mode: str | None = None,
    ) -> None:
        """
        Args:
            http: Open.
            pool: Of the workers.
            workers: Who takes part.
            version: That they are brought to.
            transport: Its name, for messages.
            timeout: Seconds for each step of a server.
            tolerant: Go on without those that fail.
            kept: The weights stay at hand for servers that are waited for, so go on without one that is gone, too.
            pause_mode: How they are paused when it is not the settings' to say, as for one that is brought back.
        """
        self.http = http
        self.version = version
        self.transport = transport
        self.timeout = timeout
        self.pause_mode = pause_mode
        self.live = list(workers)
        """Those that have taken every step so far."""
        self.facts: dict[Worker, ServerFacts] = {}
        self.failed: dict[Worker, str] = {}
        """Why the others dropped out."""
        self.unharmed: list[Worker] = []
        """Those that refused weights which every server refused, before anything was written."""
        self._pool = pool
        self._tolerant, self._kept, self._fatal = tolerant, kept, False
        self._steps: dict[Worker, asyncio.Task[Any]] = {}
        self._loop = asyncio.get_running_loop()

    async def each(self, phase: str, step: Callable[[Worker], Awaitable[object]]) -> None:
        """Take one step on every live server at once.

        Raises:
            WeightSyncError: One failed, and failures are not tolerated.
        """
        tasks = {worker: self.start(worker, self.within(step(worker))) for worker in self.live}
        results = await asyncio.gather(*tasks.values(), return_exceptions=True)
        self.judge(phase, dict(zip(tasks, results)))

    def start(self, worker: Worker, step: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Begin a step that ends, cancelled, when somebody else quarantines the server."""
        task = asyncio.create_task(step)
        self._steps[worker] = task
        task.add_done_callback(lambda _: self._steps.pop(worker, None))
        return task

    def cut(self, worker: Worker) -> None:
        """Wait no longer for a server that is quarantined by now; from any thread."""
        if worker.state is WorkerState.QUARANTINED and worker in self._steps:
            self._loop.call_soon_threadsafe(self._cancel, worker)

    def _cancel(self, worker: Worker) -> None:
        if worker in self._steps:
            self._steps[worker].cancel()

    async def within(self, step: Awaitable[T]) -> T:
        """The step's result. Raises EngineError when it takes longer than a step may."""
        try:
            async with asyncio.timeout(self.timeout):
                return await step
        except TimeoutError as error:
            raise EngineError(f"no answer within {self.timeout:g} s (--update-weight-timeout)") from error

    def judge(self, phase: str, results: dict[Worker, object]) -> None:
        """Drop the servers whose result is an error.

        Raises:
            WeightSyncError: There is one, and failures are not tolerated; or every server that lives has refused: then
                the fault is in the weights, and starting servers anew would not help.
        """
        refused = {w: r for w, r in results.items() if isinstance(r, WeightsRefused)}
        useless = bool(refused) and all(isinstance(results.get(worker), BaseException) for worker in self.live)
        for worker, result in results.items():
            if isinstance(result, asyncio.CancelledError):
                result = EngineError(f"given up, because it was quarantined: {worker.reason}")
            if isinstance(result, BaseException) and not isinstance(result, SlimeError | OSError | ValueError):
                raise result
            if useless and isinstance(result, WeightsRefused) and result.untouched:
                self.live.remove(worker)
                self.unharmed.append(worker)
            elif isinstance(result, BaseException):
                gone = isinstance(result, EngineError) and result.status is None and result.url is not None
                self._fatal |= not (self._tolerant or (self._kept and worker.awaited and gone))
                self.drop(worker, phase, result)
        if useless:
            who = "every server" if len(self.facts) > 1 else "the server"
            reasons = "; ".join(map(str, refused.values()))
            what = f"weight version {self.version} by {self.transport}, {phase}"
            raise WeightSyncError(f"{what}: {who} that answers refused the weights: {reasons}")
        if self._fatal:
            raise WeightSyncError("; ".join(self.failed.values()))

    def drop(self, worker: Worker, phase: str, error: object) -> None:
        """Take a server out of the round and of the pool's ready ones."""
        where = "" if worker.url.split("//")[-1] in str(error) else f"{worker.url}: "
        reason = f"weight version {self.version} by {self.transport}, {phase}: {where}{error}"
        if worker in self.live:
            self.live.remove(worker)
        self.failed[worker] = reason
        worker.weight_version = None
        self._pool.set_state(worker, WorkerState.QUARANTINED, reason)
        logger.warning("engine %s is quarantined: %s", worker.url, reason)

    def drop_all(self, phase: str, error: BaseException) -> None:
        """The update was cut short: nobody knows what the servers hold."""
        for worker in list(self.live):
            self.drop(worker, phase, f"cut short by {type(error).__name__}: {error}")
