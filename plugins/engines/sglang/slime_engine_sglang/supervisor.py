"""The thread in which servers and routers are watched, one `servers.Watch` each, and brought back.

`HttpEngine.start` starts it and `stop` ends it. It has an event loop and HTTP connections of its own, because the
rollout stage's event loop turns only while a rollout runs. Others take workers out too (the client, a weight update);
the watch finds them quarantined at its next turn, for which a change of state wakes it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence

from slime_core.errors import EngineError
from slime_core.protocols import Args
from slime_engine_sglang.api.router import Router
from slime_engine_sglang.api.transport import Http
from slime_engine_sglang.api.worker import Worker, WorkerState
from slime_engine_sglang.heartbeat import Heartbeat
from slime_engine_sglang.incidents import Incidents
from slime_engine_sglang.servers import COMEBACK_S, CompanionWatch, RouterWatch, Supervised, Watch, WorkerWatch

logger = logging.getLogger(__name__)

STOP_S = 60.0
"""For the thread to end; the longest step in it is killing a server."""


class Supervisor:
    """`start`, then `stop`; both may be called from any thread, `stop` twice."""

    def __init__(self, args: Args, models: Sequence[Supervised], incidents: Incidents) -> None:
        self._models = models
        self._incidents = incidents
        self._args = args
        timeout = float(args.rollout_health_check_timeout)
        self._http = Http(timeout=timeout, proxy=args.http_proxy)
        patience = timeout if args.use_fault_tolerance else min(timeout, COMEBACK_S / 2)
        self._heartbeat = Heartbeat(self._http, patience)
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopped: asyncio.Event | None = None
        self._of_workers: dict[Worker, Watch] = {}
        self._of_routers: list[RouterWatch] = []

    # -- from other threads ----------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to watch; the workers are READY, or quarantined already."""
        assert self._thread is None, "started once"
        began = threading.Event()
        for model in self._models:
            model.pool.on_change(self._changed)
            for worker in model.pool.workers:
                worker.awaited = bool(self._args.use_fault_tolerance) or worker not in model.servers
        self._thread = threading.Thread(target=self._run, args=(began,), name="slime-supervisor", daemon=True)
        self._thread.start()
        if not began.wait(STOP_S):
            raise EngineError(f"the supervisor's thread did not begin within {STOP_S:.0f} s")

    def stop(self) -> None:
        """Stop watching, in the middle of a recovery too; what it was starting is for the caller to end."""
        self._wait_no_more()
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

        def hurry() -> None:
            for watch in self._of_routers:
                watch.hurry = True
                watch.wake.set()

        self._call(hurry)

    def take_metrics(self) -> dict[str, float]:
        """engine/restarts, engine/router_restarts, engine/quarantined and engine/recovery_time since the last call."""
        return self._incidents.take_metrics()

    def _changed(self, worker: Worker) -> None:
        """A listener of the pools, in whatever thread took a worker out or put it back."""
        if worker.state is WorkerState.QUARANTINED:
            model = next(m for m in self._models if worker in m.pool.workers)
            self._incidents.tell("quarantined", model.name_of(worker), worker.url, worker.reason)
        if worker in self._of_workers:
            self._call(self._of_workers[worker].wake.set)

    def _call(self, action: Callable[[], object]) -> None:
        loop = self._loop
        if loop is not None and not loop.is_closed():
            try:
                loop.call_soon_threadsafe(action)
            except RuntimeError:  # it was closed in between
                return

    def _wait_no_more(self) -> None:
        for worker in [worker for model in self._models for worker in model.pool.workers]:
            worker.awaited = False

    # -- in the thread ---------------------------------------------------------------------------------

    def _run(self, began: threading.Event) -> None:
        try:
            asyncio.run(self._watch_all(began))
        except Exception:
            logger.exception("the supervisor stopped; engines that fail from now on stay out")
            self._wait_no_more()
        finally:
            self._loop = None

    def _watches(self) -> list[Watch]:
        args, incidents, found = self._args, self._incidents, list[Watch]()
        for model in self._models:
            router = None if model.router_url is None else Router(self._http, model.router_url)
            for worker in model.pool.workers:
                watch = WorkerWatch(model, worker, router, self._heartbeat, args, incidents)
                self._of_workers[worker] = watch
                found.append(watch)
            found += [CompanionWatch(process, self._http, args, incidents) for process in model.companions]
            if router is not None and model.router_process is not None:
                self._of_routers.append(RouterWatch(model, model.router_process, router, args, incidents))
        return [*found, *self._of_routers]

    async def _watch_all(self, began: threading.Event) -> None:
        self._loop, self._stopped = asyncio.get_running_loop(), asyncio.Event()
        async with self._http, asyncio.TaskGroup() as watching:
            tasks = [watching.create_task(watch.run()) for watch in self._watches()]
            began.set()
            await self._stopped.wait()
            for task in tasks:
                task.cancel()
