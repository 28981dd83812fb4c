"""A weight update over all servers: the steps for each server, and the handling of a server that fails.

    get facts -> pause -> (open session) -> transport -> (close session) -> check version -> flush -> resume

    for each step:  all servers at once --> servers that answered continue
                                        --> the others are QUARANTINED at once, with the reason, and leave the round

`update` opens and closes the round; transports run their part through `Round.each`. A server that got part of an update
may serve a mixture of weights, so a server that left the round never returns to it, and stays paused. SGLang is paused
even if no request runs, since a request could start between two buckets.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from slime_core.errors import EngineError, SlimeError, WeightSyncError
from slime_engine_http.api.control import flush
from slime_engine_http.api.transport import Http
from slime_engine_http.api.worker import Worker, WorkerPool, WorkerState
from slime_engine_http.weights.protocol import ServerFacts, WeightsRefused, call, served_version, server_facts

logger = logging.getLogger(__name__)
T = TypeVar("T")
CHECK = "check"
"""Name used instead of a transport when the servers' weights are compared."""
ADAPTERS = "adapters"
"""Name used instead of a transport when servers replace their adapters."""
BY_FILES = ("disk", "delta", ADAPTERS, CHECK)
"""Transports without a session, whose weights stay for a server to be brought back."""
_LEAVE_S = 5.0
_BEFORE_WRITING = ("Failed to get weights iterator", "nothing was written")
"""Error messages of each SGLang process for files that it could not open, and of slime's part of vLLM."""


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
        pause_mode: str | None = None,
        kept: bool = False,
        idle: bool = False,
    ) -> None:
        """
        Args:
            http: Open HTTP client.
            pool: Pool of the workers.
            workers: Workers to update.
            version: Weight version of the update.
            transport: Name of the transport, for messages.
            timeout: Seconds for each step of a server.
            tolerant: Continue without the servers that fail.
            pause_mode: Mode in which servers are paused; None: the best mode that each server supports.
            kept: The weights are kept for servers to be brought back, so continue without a server that is gone, too.
            idle: The servers have no requests, as when one is brought back: pause them with "abort".
        """
        self.http = http
        self.version = version
        self.transport = transport
        self.timeout = timeout
        self.live = list(workers)
        """Servers that have completed every step so far."""
        self.facts: dict[Worker, ServerFacts] = {}
        self.failed: dict[Worker, str] = {}
        """Servers that left the round, with the reasons."""
        self.unharmed: list[Worker] = []
        """Servers that refused the weights before writing anything, in an update that every server refused."""
        self._pool = pool
        self._tolerant, self._kept, self._fatal = tolerant, kept, False
        self._pause_mode, self._idle, self._in_session = pause_mode, idle, transport not in BY_FILES
        self._steps: dict[Worker, asyncio.Task[Any]] = {}
        self._loop = asyncio.get_running_loop()

    # -- the update ------------------------------------------------------------------------------------

    async def take(self, push: Callable[[Round], Awaitable[None]]) -> float:
        """Run the whole update. Returns the seconds for which the servers did not generate.

        Raises:
            WeightSyncError: Raised by `each` or by `push`.
        """
        await self.each("asking what it is", self._ask)
        started = time.perf_counter()
        await self.each("pausing", self._pause)
        if self._in_session:
            await self.each("opening the session", self.begin)
        await push(self)
        if self._in_session:
            await self.each("closing the session", self.end)
        await self.each("checking the version", self._check_version)
        await self.each("flushing the cache", self._flush)
        await self.each("resuming", self._resume)
        return time.perf_counter() - started

    async def release(self) -> None:
        """Resume the unharmed servers, and end sessions and requests of the failed servers."""
        await asyncio.gather(*map(self._go_on, self.unharmed))
        await asyncio.gather(*map(self._leave, self.failed))

    async def call(
        self, worker: Worker, path: str, body: Mapping[str, Any], timeout: float | None = None
    ) -> dict[str, Any]:
        """Call a server through `protocol.call`, by default within the seconds of a step."""
        return await call(self.http, worker.url, path, body, timeout=self.timeout if timeout is None else timeout)

    async def load(self, worker: Worker, path: str, body: Mapping[str, Any], *, first: bool = True) -> None:
        """Send a server weights, or the place to read them from; `first`: no part of them has been sent before.

        Raises:
            WeightsRefused: The server answers and refuses the weights.
            EngineError: The server does not answer.
        """
        try:
            await self.call(worker, path, body)
        except EngineError as error:
            if error.status != 400:
                raise
            raise self.refusal(worker, error, first=first) from error

    def refusal(self, worker: Worker, error: EngineError, *, first: bool) -> WeightsRefused:
        """Return the error of a server that refuses the weights. `first`: no part of them has been sent before."""
        # slime's servers check everything first; SGLang writes while it reads, once it has opened the files.
        found_none = all(any(said in part for said in _BEFORE_WRITING) for part in str(error).split(" | "))
        return WeightsRefused(str(error), untouched=first and (self.facts[worker].is_atomic or found_none))

    # -- steps of one server ---------------------------------------------------------------------------

    async def _ask(self, worker: Worker) -> None:
        self.facts[worker] = facts = await server_facts(self.http, worker.url)
        worker.software = facts.software
        if self._in_session and facts.is_atomic:
            raise WeightSyncError(f"{worker.url} is one of slime's servers: it takes weights from disk only")

    def _mode(self, worker: Worker) -> str | None:
        """Return the mode in which to pause a server; None for slime's servers, which update atomically.

        Servers that the caller has paused stay in that mode, and the caller resumes them: SGLang 0.5.20 waits forever
        if it has to end requests that it holds in place.
        """
        facts = self.facts[worker]
        best = None if facts.is_atomic else facts.pause_modes[0]
        return self._pool.pause_mode or ("abort" if best and self._idle else self._pause_mode or best)

    async def _pause(self, worker: Worker) -> None:
        mode = self._mode(worker)
        if mode is not None and self._pool.pause_mode is None:
            if not self._idle:
                self._pool.interrupt()
            await self.call(worker, "/pause_generation", {"mode": mode})

    async def _resume(self, worker: Worker) -> None:
        if self._mode(worker) is not None and self._pool.pause_mode is None:
            await self.call(worker, "/continue_generation", {})

    async def begin(self, worker: Worker) -> None:
        """Open a session, if the server has sessions. Raises EngineError."""
        if not self.facts[worker].has_sessions:
            return
        try:
            await self.call(worker, "/begin_weight_update", {})
        except EngineError as error:
            if error.status != 400:
                raise
            # An interrupted update left a session open; this update sends all weights, so close it.
            await self.end(worker, self.timeout)
            await self.call(worker, "/begin_weight_update", {})

    async def end(self, worker: Worker, timeout: float | None = None) -> None:
        """Close the session; with a `timeout` that of a failed update. Raises EngineError."""
        if self.facts[worker].has_sessions:
            done = timeout is None and self.facts[worker].file_sessions  # such a server takes the version at the end
            body = {"weight_version": str(self.version)} if done else {}
            await self.call(worker, "/end_weight_update", body, timeout)

    async def _check_version(self, worker: Worker) -> None:
        found = await served_version(self.http, worker.url)
        if found != str(self.version):
            raise EngineError(f"it reports weight version {found!r} after an update to {self.version}")
        worker.weight_version = self.version

    async def _flush(self, worker: Worker) -> None:
        """Flush the prefix cache. With pause mode "in_place" SGLang may refuse; in other modes a refusal is an error.

        Requests paused in place keep the prefixes of the old weights. SGLang refuses to flush while it has such
        requests, or has just answered one. Requests that begin after the update use another part of the cache
        (`Client`).
        """
        if not self.facts[worker].is_atomic:
            await flush(self.http, worker.url, must=self._mode(worker) != "in_place")

    async def _go_on(self, worker: Worker) -> None:
        """Resume a server that refused before writing anything; drop it if it does not report the old version."""
        try:
            wanted, served = self._pool.version_wanted, await served_version(self.http, worker.url)
            if served == str(self.version) or (wanted is not None and served != str(wanted)):
                raise EngineError(f"{worker.url} reports weight version {served!r}, wanted is {wanted}")
            await self._resume(worker)
        except EngineError as error:
            self.drop(worker, "going on with the old weights", error)

    async def _leave(self, worker: Worker) -> None:
        """Try to end the session and the requests of a failed server, with a short time limit."""
        await self.end_session(worker)
        self._pool.interrupt()
        with contextlib.suppress(EngineError):
            await self.call(worker, "/abort_request", {"abort_all": True}, _LEAVE_S)

    async def end_session(self, worker: Worker) -> None:
        """Try to end the session of a failed server, which may be dead."""
        with contextlib.suppress(EngineError):
            if worker in self.facts and (self._in_session or self.facts[worker].file_sessions):
                await self.end(worker, _LEAVE_S)

    # -- who is left -----------------------------------------------------------------------------------

    async def each(self, phase: str, step: Callable[[Worker], Awaitable[object]]) -> None:
        """Run a step on every live server at once.

        Raises:
            WeightSyncError: A server failed, and failures are not tolerated.
        """
        tasks = {worker: self.start(worker, self.within(step(worker))) for worker in self.live}
        results = await asyncio.gather(*tasks.values(), return_exceptions=True)
        self.judge(phase, dict(zip(tasks, results)))

    def start(self, worker: Worker, step: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a step as a task, which is cancelled if the supervisor quarantines the server."""
        task = asyncio.create_task(step)
        self._steps[worker] = task
        task.add_done_callback(lambda _: self._steps.pop(worker, None))
        return task

    def cut(self, worker: Worker) -> None:
        """Cancel the step of a server that has been quarantined; any thread may call it."""
        if worker.state is WorkerState.QUARANTINED and worker in self._steps:
            self._loop.call_soon_threadsafe(self._cancel, worker)

    def _cancel(self, worker: Worker) -> None:
        if worker in self._steps:
            self._steps[worker].cancel()

    async def within(self, step: Awaitable[T]) -> T:
        """Return the step's result. Raises EngineError if the step exceeds its time limit."""
        try:
            async with asyncio.timeout(self.timeout):
                return await step
        except TimeoutError as error:
            raise EngineError(f"no answer within {self.timeout:g} s (--update-weight-timeout)") from error

    def judge(self, phase: str, results: dict[Worker, object]) -> None:
        """Drop the servers whose result is an error.

        Raises:
            WeightSyncError: A server failed, and failures are not tolerated; or every live server refused the weights,
                so the weights are wrong and restarting servers would not help.
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
        """Take a server out of the round and quarantine it in the pool."""
        where = "" if worker.url.split("//")[-1] in str(error) else f"{worker.url}: "
        reason = f"weight version {self.version} by {self.transport}, {phase}: {where}{error}"
        if worker in self.live:
            self.live.remove(worker)
        self.failed[worker] = reason
        worker.weight_version = None
        self._pool.set_state(worker, WorkerState.QUARANTINED, reason)
        logger.warning("engine %s is quarantined: %s", worker.url, reason)

    def drop_all(self, phase: str, error: BaseException) -> None:
        """Drop all live servers after an interrupted update, since their weights are unknown."""
        for worker in list(self.live):
            self.drop(worker, phase, f"cut short by {type(error).__name__}: {error}")
