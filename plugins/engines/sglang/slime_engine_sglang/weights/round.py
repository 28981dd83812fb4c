"""One weight update as its servers see it: who takes part, and what becomes of a server that fails.

    ask what it is -> pause -> (open session) -> transport -> (close session) -> version as wanted? -> flush -> resume

    for each step:  all servers at once --> those that answered go on
                                        --> the others are QUARANTINED at once, with the reason, and drop out

`update` opens and closes the round, transports run their part through `Round.each`. A server that has taken part of an
update may serve any mixture of weights, so dropping out is never undone inside the round, and it stays paused. SGLang
is paused even when nothing runs, since between two buckets a request could start.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from slime_core.errors import EngineError, SlimeError, WeightSyncError
from slime_engine_sglang.api.control import flush
from slime_engine_sglang.api.transport import Http
from slime_engine_sglang.api.worker import Worker, WorkerPool, WorkerState
from slime_engine_sglang.weights.protocol import ServerFacts, WeightsRefused, call, served_version, server_facts

logger = logging.getLogger(__name__)
T = TypeVar("T")
CHECK = "check"
"""In the place of a transport, where the servers are compared."""
BY_FILES = ("disk", "delta", CHECK)
"""What any server takes, without a session."""
_LEAVE_S = 5.0
_BEFORE_WRITING = "Failed to get weights iterator"
"""SGLang's words, from each of its processes, for files that it could not open."""


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
            http: Open.
            pool: Of the workers.
            workers: Who takes part.
            version: That they are brought to.
            transport: Its name, for messages.
            timeout: Seconds for each step of a server.
            tolerant: Go on without those that fail.
            pause_mode: How they are paused; None: in the best way that each knows.
            kept: The weights stay at hand for servers that are waited for, so go on without one that is gone, too.
            idle: No request is there, as at one that is brought back: it is paused with "abort".
        """
        self.http = http
        self.version = version
        self.transport = transport
        self.timeout = timeout
        self.live = list(workers)
        """Those that have taken every step so far."""
        self.facts: dict[Worker, ServerFacts] = {}
        self.failed: dict[Worker, str] = {}
        """Why the others dropped out."""
        self.unharmed: list[Worker] = []
        """Those that refused weights which every server refused, before anything was written."""
        self._pool = pool
        self._tolerant, self._kept, self._fatal = tolerant, kept, False
        self._pause_mode, self._idle, self._in_session = pause_mode, idle, transport not in BY_FILES
        self._steps: dict[Worker, asyncio.Task[Any]] = {}
        self._loop = asyncio.get_running_loop()

    # -- the update ------------------------------------------------------------------------------------

    async def take(self, push: Callable[[Round], Awaitable[None]]) -> float:
        """The whole update; seconds for which the servers generated nothing.

        Raises:
            WeightSyncError: As `each`, and what `push` raises.
        """
        await self.each("asking what it is", self._ask)
        started = time.perf_counter()
        await self.each("pausing", self._pause)
        if self._in_session:
            await self.each("opening the session", self._begin)
        await push(self)
        if self._in_session:
            await self.each("closing the session", self._end)
        await self.each("checking the version", self._check_version)
        await self.each("flushing the cache", self._flush)
        await self.each("resuming", self._resume)
        return time.perf_counter() - started

    async def release(self) -> None:
        """What is due to the servers that did not take it."""
        await asyncio.gather(*map(self._go_on, self.unharmed))
        await asyncio.gather(*map(self._leave, self.failed))

    async def call(
        self, worker: Worker, path: str, body: Mapping[str, Any], timeout: float | None = None
    ) -> dict[str, Any]:
        """As `protocol.call`, by default within the seconds of a step."""
        return await call(self.http, worker.url, path, body, timeout=self.timeout if timeout is None else timeout)

    async def load(self, worker: Worker, path: str, body: Mapping[str, Any], *, first: bool = True) -> None:
        """A `call` with weights, or the last word of where they are; `first`: nothing of them has been sent before.

        Raises:
            WeightsRefused: The server lives and says no.
            EngineError: It does not answer.
        """
        try:
            await self.call(worker, path, body)
        except EngineError as error:
            if error.status != 400:
                raise
            # Servers of ours check everything first; SGLang writes while it reads, once it has found the files.
            found_none = all(_BEFORE_WRITING in part for part in str(error).split(" | "))
            untouched = first and (not self.facts[worker].is_sglang or found_none)
            raise WeightsRefused(str(error), untouched=untouched) from error

    # -- steps of one server ---------------------------------------------------------------------------

    async def _ask(self, worker: Worker) -> None:
        self.facts[worker] = facts = await server_facts(self.http, worker.url)
        worker.software = facts.software
        if self._in_session and not facts.is_sglang:
            raise WeightSyncError(f"{worker.url} is no SGLang server: it takes weights from disk only")

    def _mode(self, worker: Worker) -> str | None:
        """How it is paused; servers of ours take an update in one piece and need no pause.

        Those that the caller has paused stay as they are, and are his to resume: told to end the requests that it holds
        in place, SGLang 0.5.20 waits for them for ever.
        """
        facts = self.facts[worker]
        best = facts.pause_modes[0] if facts.is_sglang else None
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

    async def _begin(self, worker: Worker) -> None:
        if not self.facts[worker].has_sessions:
            return
        try:
            await self.call(worker, "/begin_weight_update", {})
        except EngineError as error:
            if error.status != 400:
                raise
            # A session is open, left by an update that was cut; this one sends all weights anew.
            await self._end(worker)
            await self.call(worker, "/begin_weight_update", {})

    async def _end(self, worker: Worker, timeout: float | None = None) -> None:
        if self.facts[worker].has_sessions:
            await self.call(worker, "/end_weight_update", {}, timeout)

    async def _check_version(self, worker: Worker) -> None:
        found = await served_version(self.http, worker.url)
        if found != str(self.version):
            raise EngineError(f"it reports weight version {found!r} after an update to {self.version}")
        worker.weight_version = self.version

    async def _flush(self, worker: Worker) -> None:
        """Requests paused in place keep the prefixes of the old weights, as they were promised; others must not.

        So in place the cache may stay, refused for those or for one that was just answered. Requests that begin after
        the update look into another part of it (`Client`).
        """
        if self.facts[worker].is_sglang:  # servers of ours do so with the update
            await flush(self.http, worker.url, must=self._mode(worker) != "in_place")

    async def _go_on(self, worker: Worker) -> None:
        """A server that refused before it wrote anything serves what it served; one that does not say so is out."""
        try:
            wanted, served = self._pool.version_wanted, await served_version(self.http, worker.url)
            if served == str(self.version) or (wanted is not None and served != str(wanted)):
                raise EngineError(f"{worker.url} reports weight version {served!r}, wanted is {wanted}")
            await self._resume(worker)
        except EngineError as error:
            self.drop(worker, "going on with the old weights", error)

    async def _leave(self, worker: Worker) -> None:
        """It is not worth waiting for, but if it lives, its session and its requests should end."""
        await self.end_session(worker)
        self._pool.interrupt()
        with contextlib.suppress(EngineError):
            await self.call(worker, "/abort_request", {"abort_all": True}, _LEAVE_S)

    async def end_session(self, worker: Worker) -> None:
        """Of one that failed, if it lives."""
        with contextlib.suppress(EngineError):
            if worker in self.facts and self._in_session:
                await self._end(worker, _LEAVE_S)

    # -- who is left -----------------------------------------------------------------------------------

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
