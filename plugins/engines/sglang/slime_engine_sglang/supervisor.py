"""Watches the servers and routers of a run from a thread of its own, and brings back what can be brought back.

`SglangEngine.start` starts it and `stop` ends it. One task per worker and one per router, in an event loop and over
HTTP connections of the thread, because the rollout stage's event loop turns only while a rollout runs.

    READY --(process ended, hung, other weights)--> QUARANTINED --(recovery.py)--> READY
    external: READY --(silent, other weights)--> QUARANTINED --(answers, caught up, checked)--> READY

Without --use-fault-tolerance it only takes workers out whose process has ended, and says how it ended. What a reader
would get wrong: others take workers out too (the client, a weight update); the watch finds them quarantined at its next
turn, for which a change of state wakes it.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from slime_core.errors import EngineError, WeightSyncError
from slime_core.protocols import Args
from slime_engine_sglang.api.router import Router
from slime_engine_sglang.api.transport import Http
from slime_engine_sglang.api.worker import Worker, WorkerPool, WorkerState
from slime_engine_sglang.companion_watch import CompanionWatch
from slime_engine_sglang.heartbeat import Heartbeat
from slime_engine_sglang.incidents import Incidents
from slime_engine_sglang.recovery import Process, Recovery, Supervised
from slime_engine_sglang.router_watch import RouterWatch

logger = logging.getLogger(__name__)

TICK_S = 0.5
"""Between two looks at whether a process still lives."""
STOP_S = 60.0
"""For the thread to end; the longest step in it is killing a server."""


class Supervisor:
    """`start`, then `stop`; both may be called from any thread, `stop` twice."""

    def __init__(self, args: Args, models: Sequence[Supervised], incidents: Incidents) -> None:
        self._models = models
        self._incidents = incidents
        self._brings_back = bool(args.use_fault_tolerance)
        self._interval = float(args.rollout_health_check_interval)
        self._timeout = float(args.rollout_health_check_timeout)
        self._first_wait = float(args.rollout_health_check_first_wait)
        self._max_restarts = int(args.rollout_max_engine_restarts)
        self._http = Http(timeout=self._timeout, proxy=getattr(args, "http_proxy", None))
        self._heartbeat = Heartbeat(self._http, self._timeout)
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopped: asyncio.Event | None = None
        self._wake: dict[Worker | str, asyncio.Event] = {}

    # -- from other threads ----------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to watch; the workers are READY, or quarantined already."""
        assert self._thread is None, "started once"
        began = threading.Event()
        for model in self._models:
            model.out_since = dict.fromkeys(model.pool.workers, time.monotonic())  # some may be out already
            model.pool.on_change(self._changed)
            model.pool.recovering = self._brings_back
        self._thread = threading.Thread(target=self._run, args=(began,), name="slime-supervisor", daemon=True)
        self._thread.start()
        if not began.wait(STOP_S):
            raise EngineError(f"the supervisor's thread did not begin within {STOP_S:.0f} s")

    def stop(self) -> None:
        """Stop watching, in the middle of a recovery too; what it was starting is for the caller to end."""
        for model in self._models:
            model.pool.recovering = False
        thread, self._thread = self._thread, None
        if thread is None:
            return
        if self._stopped is not None:
            self._call(self._stopped.set)
        thread.join(STOP_S)
        if thread.is_alive():
            logger.warning("the supervisor's thread did not end within %.0f s", STOP_S)

    def router_failed(self) -> None:
        """A client could not reach a router: look at the routers now."""
        for key in [key for key in self._wake if isinstance(key, str)]:
            self._call(functools.partial(self._wake_up, key))

    def take_metrics(self) -> dict[str, float]:
        """engine/restarts, engine/router_restarts, engine/quarantined and engine/recovery_time since the last call."""
        return self._incidents.take_metrics()

    def _changed(self, worker: Worker) -> None:
        """A listener of the pools, in whatever thread took a worker out or put it back."""
        if worker.state is WorkerState.QUARANTINED:
            model = next(m for m in self._models if worker in m.pool.workers)
            model.out_since[worker] = time.monotonic()
            self._incidents.tell("quarantined", model.name_of(worker), worker.url, worker.reason)
        self._call(functools.partial(self._wake_up, worker))

    def _call(self, action: Callable[[], object]) -> None:
        loop = self._loop
        if loop is not None and not loop.is_closed():
            try:
                loop.call_soon_threadsafe(action)
            except RuntimeError:  # it was closed in between
                return

    # -- in the thread ---------------------------------------------------------------------------------

    def _run(self, began: threading.Event) -> None:
        try:
            asyncio.run(self._watch_all(began))
        except Exception:
            logger.exception("the supervisor stopped; engines that fail from now on stay out")
            for model in self._models:
                model.pool.recovering = False
        finally:
            self._loop = None

    async def _watch_all(self, began: threading.Event) -> None:
        self._loop, self._stopped = asyncio.get_running_loop(), asyncio.Event()
        await self._http.open()
        watches: list[Coroutine[Any, Any, None]] = []
        for model in self._models:
            router = None if model.router_url is None else Router(self._http, model.router_url)
            recovery = Recovery(model, self._heartbeat, self._incidents, router, self._max_restarts)
            for worker in model.pool.workers:
                self._wake[worker] = asyncio.Event()
                server = model.servers.get(worker)
                if server is not None:
                    watches.append(self._watch_owned(model, worker, server, recovery))
                elif self._brings_back:
                    watches.append(self._watch_external(model, worker, recovery))
            interval = self._interval if self._brings_back else None
            for process in model.companions:
                companion = CompanionWatch(self._http, process, self._incidents, self._max_restarts)
                watches.append(companion.run(interval, self._first_wait, self._timeout, TICK_S))
            if router is not None and model.router_process is not None:
                wake = self._wake[f"router of {model.name}"] = asyncio.Event()
                watch = RouterWatch(model, router, model.router_process, self._incidents, self._max_restarts)
                watches.append(watch.run(interval, self._timeout, wake, TICK_S))
        began.set()
        tasks = [asyncio.create_task(watch) for watch in watches]
        stop = asyncio.create_task(self._stopped.wait())
        try:
            while not stop.done() and not any(task.done() and task.exception() for task in tasks):
                await asyncio.wait([stop, *(t for t in tasks if not t.done())], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in [*tasks, stop]:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            await self._http.close()
        for result in ended:
            if isinstance(result, Exception):
                raise result

    async def _watch_owned(self, model: Supervised, worker: Worker, server: Process, recovery: Recovery) -> None:
        next_beat = time.monotonic() + max(self._first_wait, self._interval)
        while worker not in model.lost:
            if worker.state is WorkerState.READY and not server.alive:
                self._quarantine(model.pool, worker, server.last_words())
            elif worker.state is WorkerState.READY and self._brings_back and time.monotonic() >= next_beat:
                await self._beat(model, worker, server)
                next_beat = time.monotonic() + self._interval
            if worker.state is not WorkerState.QUARANTINED:
                await self._next(worker, TICK_S)
            elif self._brings_back:
                await recovery.restart(worker, server)
                next_beat = time.monotonic() + max(self._first_wait, self._interval)
                model.pool.recovering = len(model.lost) < len(model.pool.workers)
            else:
                await recovery.out_of_router(worker)
                return

    async def _watch_external(self, model: Supervised, worker: Worker, recovery: Recovery) -> None:
        while True:
            await self._next(worker, self._interval)
            if worker.state is WorkerState.READY:
                await self._beat(model, worker, None)
                continue
            await recovery.out_of_router(worker)
            try:
                await self._heartbeat.wake(model.pool, worker)
                finding = await self._heartbeat.look(model.pool, worker)
                if finding.reason and not finding.lying:
                    continue
                await recovery.readmit(worker)
            except (EngineError, WeightSyncError) as error:
                logger.debug("%s stays out: %s", worker.url, error)
            else:
                seconds = time.monotonic() - model.out_since[worker]
                self._incidents.tell("readmitted", model.name_of(worker), worker.url, seconds=seconds)

    async def _beat(self, model: Supervised, worker: Worker, server: Process | None) -> None:
        pool = model.pool
        finding = await self._heartbeat.look(pool, worker, lambda: server is None or server.alive)
        if server is not None and not server.alive:
            self._quarantine(pool, worker, server.last_words())
        elif finding.lying:
            # An update may have passed between its answer and now, so it is asked again while none can.
            if pool.update_lock.acquire(blocking=False):
                try:
                    again = await self._heartbeat.weights(pool, worker, locked=True)
                    if again.reason:
                        self._quarantine(pool, worker, again.reason)
                finally:
                    pool.update_lock.release()
        elif finding.reason:
            self._quarantine(pool, worker, finding.reason)

    def _quarantine(self, pool: WorkerPool, worker: Worker, reason: str) -> None:
        if worker.state is WorkerState.READY:
            pool.set_state(worker, WorkerState.QUARANTINED, reason)

    async def _next(self, key: Worker, seconds: float) -> None:
        """Until the worker's state changes, at most so long."""
        wake = self._wake[key]
        try:
            async with asyncio.timeout(seconds):
                await wake.wait()
        except TimeoutError:
            pass
        wake.clear()

    def _wake_up(self, key: Worker | str) -> None:
        if key in self._wake:
            self._wake[key].set()
