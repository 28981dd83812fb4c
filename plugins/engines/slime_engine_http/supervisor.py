"""The thread in which servers and routers are watched, one `servers.Watch` each, and brought back.

`HttpEngine.start` starts it and `stop` ends it. It has an event loop and HTTP connections of its own, because the
rollout stage's event loop turns only while a rollout runs. Others take workers out too (the client, a weight update);
the watch finds them quarantined at its next turn, for which a change of state wakes it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress

from slime_core.protocols import Args
from slime_core.rollout.event_loop import LoopThread
from slime_engine_http.api.router import Router
from slime_engine_http.api.transport import Http
from slime_engine_http.api.worker import Worker, WorkerState
from slime_engine_http.incidents import Incidents
from slime_engine_http.servers import CompanionWatch, RouterWatch, Supervised, Watch
from slime_engine_http.worker_watch import WorkerWatch

logger = logging.getLogger(__name__)


class Supervisor:
    """`start`, then `stop`; both may be called from any thread, `stop` twice."""

    def __init__(
        self, args: Args, models: Sequence[Supervised], incidents: Incidents, http_class: type[Http] = Http
    ) -> None:
        self._args, self._models, self._incidents = args, models, incidents
        self._http = http_class(timeout=float(args.rollout_health_check_timeout), proxy=args.http_proxy)
        self._thread = LoopThread("slime-supervisor")
        self.of_workers: dict[Worker, WorkerWatch] = {}
        """From `start` on."""
        self._of_routers: list[RouterWatch] = []
        self._others: list[Watch] = []

    def start(self) -> None:
        """Begin to watch; the workers are READY, or quarantined already."""
        args, incidents = self._args, self._incidents
        for model in self._models:
            router = None if model.router_url is None else Router(self._http, model.router_url)
            for worker in model.pool.workers:
                worker.awaited = bool(args.use_fault_tolerance) or worker not in model.servers
                self.of_workers[worker] = WorkerWatch(model, worker, router, self._http, args, incidents)
            self._others += [CompanionWatch(process, self._http, args, incidents) for process in model.companions]
            if router is not None and model.router_process is not None:
                self._of_routers.append(RouterWatch(model, model.router_process, router, args, incidents))
            model.pool.on_change(self._changed)
        self._thread.submit(self._watch_all()).add_done_callback(self._ended)

    def stop(self) -> None:
        """Stop watching, in the middle of a recovery too; what it was starting is for the caller to end."""
        self._wait_no_more()
        self._thread.close()

    def router_failed(self) -> None:
        """A client could not reach a router: look at the routers now."""
        for watch in self._of_routers:
            watch.hurry = True
            self._call(watch.wake.set)

    def take_metrics(self) -> dict[str, float]:
        """engine/restarts, engine/router_restarts, engine/quarantined and engine/recovery_time since the last call."""
        return self._incidents.take_metrics()

    def _changed(self, worker: Worker) -> None:
        """A listener of the pools, in whatever thread took a worker out or put it back."""
        watch = self.of_workers[worker]
        if worker.state is WorkerState.QUARANTINED:
            self._incidents.tell("quarantined", watch.name, worker.url, worker.reason)
        self._call(watch.wake.set)

    def _call(self, action: Callable[[], object]) -> None:
        with suppress(RuntimeError):  # it was stopped
            self._thread.loop.call_soon_threadsafe(action)

    def _wait_no_more(self) -> None:
        for worker in self.of_workers:
            worker.awaited = False

    def _ended(self, watching: Future[None]) -> None:
        if not watching.cancelled() and (error := watching.exception()) is not None:
            logger.error("the supervisor stopped; engines that fail from now on stay out", exc_info=error)
            self._wait_no_more()

    async def _watch_all(self) -> None:
        try:
            async with self._http, asyncio.TaskGroup() as watching:
                for watch in (*self.of_workers.values(), *self._others, *self._of_routers):
                    watching.create_task(watch.run())
        finally:  # a start or a kill that is under way, in a thread
            await asyncio.get_running_loop().shutdown_default_executor()
