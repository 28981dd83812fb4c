"""A `RolloutEngine` over SGLang servers that are already running: slime's own servers, real SGLang, or several of them.

The rollout stage uses it when `--rollout-engine http` is chosen; the `sglang` engine, which launches its servers,
extends it. Generation requests go through the router or to one worker (`client`). All other requests go to every worker
(`control`, `weights`), because routers do not forward them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import urlsplit

from slime_runs.events import EventLog

from slime_core.config import Settings
from slime_core.errors import ConfigError, EngineError, WeightSyncError
from slime_core.protocols import Args, EngineTraits
from slime_core.sample import GenerationOutput
from slime_engine_http.api.answers import Wire
from slime_engine_http.api.client import Client
from slime_engine_http.api.control import PAUSE_MODES, Control
from slime_engine_http.api.router import Router
from slime_engine_http.api.transport import Http, server_url
from slime_engine_http.api.versions import untested
from slime_engine_http.api.worker import Worker, WorkerPool, WorkerState
from slime_engine_http.incidents import Incidents
from slime_engine_http.ports import url_host
from slime_engine_http.servers import Supervised, WeightsNotKept
from slime_engine_http.supervisor import Supervisor
from slime_engine_http.weights.check import require_checksums
from slime_engine_http.weights.delta import update_by_deltas
from slime_engine_http.weights.update import WEIGHT_SETTINGS, WeightUpdates

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

DELTA = "delta"
"""Weight transport that uses pullers on the servers' hosts."""
_COUNTS = (
    "requests", "retried_requests", "continued_requests", "bypassed_router", "wrong_version_answers", "broken_streams",
)  # fmt: skip


def without_deltas(settings: Settings) -> list[str]:
    """Return a warning if pullers are set but the transport sends no deltas."""
    if not settings.args.update_weight_puller_addrs or settings.args.update_weight_transport == DELTA:
        return []
    return [f"{settings.cite('update_weight_puller_addrs')} has no effect without --update-weight-mode delta."]


def check_sampling_mask(settings: Settings) -> None:
    """Raise ConfigError if SGLang would refuse every request for a sampling mask.

    SGLang returns at most --sglang-sampling-mask-max-tokens ids, a limit that only a finite top_k guarantees.
    """
    args = settings.args
    if args.use_sampling_mask and args.rollout_top_p < 1 and args.rollout_top_k == -1:
        raise ConfigError(
            f"{settings.cite('use_sampling_mask')}: SGLang returns what tokens are sampled among for a finite top_k"
            f" only; type --rollout-top-k 1000 beside {settings.cite('rollout_top_p')}"
        )


def check_adapters(settings: Settings) -> None:
    """Raise ConfigError for settings of adapters that servers with LoRA layers of their own exclude."""
    args = settings.args
    if args.lora_unmerged and args.check_weight_update_equal:
        raise ConfigError(
            f"{settings.cite('check_weight_update_equal')}: servers have no checksums of adapters; remove it, or"
            f" {settings.cite('lora_unmerged')}."
        )
    if args.lora_adapters and not args.lora_unmerged:
        raise ConfigError(
            f"{settings.cite('lora_adapters')}: servers choose among adapters that they add themselves; type"
            " --lora-unmerged, too."
        )


class HttpEngine(Control):
    """Constructed as `HttpEngine(args)`; connects in `start`. Subclasses bring their servers in `_find_workers`."""

    traits = EngineTraits(
        runs_elsewhere=True,
        returns_routed_experts=True,
        returns_sampling_mask=True,
        takes_images=True,
        pause_modes=PAUSE_MODES,
        uses=WEIGHT_SETTINGS
        | {
            "rollout_external_engine_addrs",
            "rollout_health_check_first_wait",
            "rollout_health_check_interval",
            "rollout_health_check_timeout",
            "update_weight_puller_addrs",
            "use_fault_tolerance",
        },
    )
    weight_transports: tuple[str, ...] = ("distributed", "disk")
    """Transports that may be offered; `start` limits them to those that the servers support."""
    http_class: ClassVar[type[Http]] = Http
    """Class of every connection to the servers, which translates control calls for servers other than SGLang's."""
    updates_class: ClassVar[type[WeightUpdates]] = WeightUpdates
    warn_untested = staticmethod(untested)
    """Returns a warning about a version of an external server; empty for a tested version."""

    def __init__(self, args: Args) -> None:
        super().__init__(self.http_class(timeout=args.rollout_timeout or 3600.0, proxy=args.http_proxy), WorkerPool([]))
        self._args = args
        self.wire = Wire(self.adapters)
        """Form of requests for tokens."""
        self.router: Router | None = None
        self.weights = self.updates_class(self.http, self.pool, args)
        self.supervised: list[Supervised] = []
        """The models with the servers of their workers; the rollout's model is first."""
        self._client: Client | None = None
        self._supervisor: Supervisor | None = None
        self._undo = AsyncExitStack()
        """Cleanup that `stop` runs."""
        self.pullers = [server_url(a, "--update-weight-puller-addrs") for a in args.update_weight_puller_addrs or ()]
        """URLs of the processes that fetch deltas to the servers' hosts."""
        if self.pullers:
            self.weight_transports = (*self.weight_transports, DELTA)

    @classmethod
    def check_settings(cls, settings: Settings) -> list[str]:
        """Check that deltas and pullers are set together. Raises ConfigError."""
        check_sampling_mask(settings)
        args, pullers = settings.args, "update_weight_puller_addrs"
        if args.update_weight_transport == DELTA and not getattr(args, pullers):
            raise ConfigError(
                f"{settings.cite('update_weight_transport')}: servers that are running already take deltas by"
                " --update-weight-puller-addrs HOST:PORT ... (slime pull-weights)"
            )
        return without_deltas(settings)

    def adapters(self) -> Sequence[str] | None:
        """Return the names of `--lora-adapters` once the servers have them; None if they serve merged weights."""
        return self._args.lora_adapters if self._args.lora_unmerged and self.pool.version_wanted is not None else None

    # -- life ------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Find the workers and wait until each is healthy. Raises ConfigError, EngineError."""
        if self._client is not None:
            return
        undo = self._undo
        try:
            await self.http.open()
            undo.push_async_callback(self.http.close)
            self.pool, self.router = await self._find_workers()
            self._held.clear()
            if self.pool.workers:  # there may be a router only, for the user's own functions
                await self.healthy()
            self.weights = self.updates_class(self.http, self.pool, self._args)
            undo.callback(self.weights.close)
            if self._args.check_weight_update_equal:
                await require_checksums(self.http, self.pool.ready, float(self._args.update_weight_timeout))
            deltas = (DELTA,) if self.pullers else ()
            self.weight_transports = (*await self.weights.transports(), *deltas)
            for worker in self.pool.workers:
                # The versions of servers launched here have been checked by check_settings.
                if not worker.owned and (warning := self.warn_untested(worker.software)):
                    logger.warning("%s: %s", worker.url, warning)
            self._client = Client(
                self.http,
                self.pool,
                self.router,
                self._args,
                wire=self.wire,
                check_versions=self.check_versions,
                router_failed=self._router_failed,
            )
            if not self.supervised:  # external servers, with an external router
                self.supervised = [Supervised("default", self.pool, {}, catch_up=self.catch_up)]
            incidents = Incidents(EventLog(run_dir(self._args)))
            self._supervisor = Supervisor(self._args, self.supervised, incidents, self.http_class)
            undo.push_async_callback(asyncio.to_thread, self._supervisor.stop)
            undo.callback(self._client.close)
            self._supervisor.start()
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Close the connections and undo everything that `start` did, in reverse order; safe to call twice."""
        undo, self._undo = self._undo, AsyncExitStack()
        self._supervisor = self._client = None
        self.supervised = []
        await undo.aclose()

    async def address(self) -> tuple[str, int]:
        """Return the address of the router, or of the first server."""
        return host_port(self.pool, self.router)

    async def _find_workers(self) -> tuple[WorkerPool, Router | None]:
        """Return the servers, all READY, and their router; `start` calls this once."""
        given = self._args.rollout_external_engine_addrs
        if given:
            return WorkerPool([Worker(server_url(a), state=WorkerState.READY) for a in given]), None
        host = self._args.sglang_router_ip
        port = self._args.sglang_router_port
        if not host or not port:
            raise ConfigError(
                "the http engine needs servers: --rollout-external-engine-addrs HOST:PORT ..."
                " or --sglang-router-ip and --sglang-router-port"
            )
        router = Router(self.http, server_url(f"{url_host(host)}:{port}"))
        workers = await router.list_workers()
        if workers is None:  # without a list of workers, the address is a server's
            return WorkerPool([Worker(router.url, state=WorkerState.READY)]), None
        if not workers:
            raise EngineError(f"the router at {router.url} has no workers")
        return WorkerPool([Worker(url, state=WorkerState.READY) for url in workers]), router

    # -- generating ------------------------------------------------------------------------------------

    async def generate(
        self,
        input_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        *,
        rid: str | None = None,
        session_id: str | None = None,
        image_data: Sequence[str] = (),
        adapter: str | None = None,
    ) -> GenerationOutput:
        """Continue `input_ids`, which hold the tokens of the images `image_data`. Raises EngineError."""
        return await self._running().generate(input_ids, sampling_params, rid, session_id, image_data, adapter)

    def stream(
        self,
        input_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        *,
        rid: str | None = None,
        session_id: str | None = None,
        image_data: Sequence[str] = (),
        adapter: str | None = None,
    ) -> AsyncIterator[GenerationOutput]:
        """Generate like `generate`, and yield the whole output so far with each event."""
        return self._running().stream(input_ids, sampling_params, rid, session_id, image_data, adapter)

    def _running(self) -> Client:
        if self._client is None:
            raise EngineError("the engine is not running; await start() first")
        return self._client

    # -- control ---------------------------------------------------------------------------------------

    async def abort(self, rid: str | None = None) -> None:
        """Abort a request, or all requests, on every worker; waiting requests are not started."""
        await super().abort(self._running().abort(rid))

    async def resume(self) -> None:
        """Continue generation after `pause`."""
        await super().resume()
        self._running().resumed()

    async def resume_memory(self, tags: Sequence[str] | None = None) -> None:
        """Make every worker take its memory again."""
        await super().resume_memory(tags)
        self._running().resumed()

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics since the last call, and the current engine/ready_workers.

        The metrics are engine/requests, retried_requests, continued_requests, bypassed_router, wrong_version_answers,
        broken_streams and the supervisor's.
        """
        counts = self._client.counts if self._client is not None else {}
        metrics = {f"engine/{name}": float(counts.get(name, 0)) for name in _COUNTS}
        if self._client is not None:
            self._client.counts.clear()
        metrics |= {"engine/ready_workers": float(len(self.pool.ready))}
        return metrics | (self._supervisor.take_metrics() if self._supervisor is not None else {})

    def _router_failed(self) -> None:
        """Make the supervisor check a router that slime launched; meanwhile requests go directly to the servers."""
        if not any(model.router_process for model in self.supervised):
            logger.warning("the router does not answer; requests go to the servers directly")
        elif self._supervisor is not None:
            self._supervisor.router_failed()

    # -- weights ---------------------------------------------------------------------------------------

    async def update_weights_from_tensor(
        self, weights: Iterable[tuple[str, torch.Tensor]], version: int
    ) -> dict[str, float]:
        """Send weights by shared memory, to servers launched on this host. Raises WeightSyncError."""
        return await self.weights.from_tensors(weights, version)

    async def update_weights_from_distributed(
        self, weights: Iterable[tuple[str, torch.Tensor]], version: int
    ) -> dict[str, float]:
        """Send weights by broadcast, to SGLang servers anywhere. Raises WeightSyncError."""
        return await self.weights.from_broadcast(weights, version)

    async def update_weights_from_disk(self, path: Path, version: int) -> dict[str, float]:
        """Load an HF-layout directory, which every worker must see under the same path. Raises WeightSyncError."""
        return await self.weights.from_directory(path, version)

    async def update_weights_from_delta(self, root: Path, version: int) -> dict[str, float]:
        """Make the pullers, which read `root` on their own hosts, fetch and load the delta. Raises WeightSyncError."""
        timeout = float(self._args.update_weight_timeout)
        return await update_by_deltas(self.weights, self.pullers, version, timeout=timeout)

    async def catch_up(self, worker: Worker) -> None:
        """Send the wanted weights to a server (`WeightUpdates.catch_up`). Raises WeightSyncError, EngineError."""
        if self.weights.last is None:
            raise WeightsNotKept(
                f"has come back without the weights of version {self.pool.version_wanted}, which are kept for it with"
                " --use-fault-tolerance or --update-weight-transport disk only"
            )
        await self.weights.catch_up(worker)

    async def differing_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
        """Return an empty list, or raise. A server with other weights is quarantined; fault tolerance restores it.

        Raises:
            WeightSyncError: A server serves other weights; the message names such servers and their weights.
        """
        await self.weights.check(weights)
        return []

    async def weight_checksums(self) -> dict[str, str]:
        """Raise WeightSyncError: SGLang holds other tensors than the trained ones, see `differing_weights`."""
        raise WeightSyncError("servers tell no checksums of the tensors that were trained")


def host_port(pool: WorkerPool, router: Router | None) -> tuple[str, int]:
    """Return the host and port of a model's router, or of its first server."""
    url = urlsplit(router.url if router is not None else pool.workers[0].url)
    assert url.hostname is not None, "server_url has checked it"
    assert url.port is not None
    return url.hostname, url.port


def run_dir(args: Args) -> Path | None:
    """Return the run's directory for events and logs."""
    directory = args.run_dir
    return Path(directory) if directory else None
