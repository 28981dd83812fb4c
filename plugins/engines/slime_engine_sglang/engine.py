"""The engine `sglang`: launches SGLang servers and their routers by the plan, and generates through them.

`start` makes the plan, starts the processes (`fleet`), registers the servers at the router, and starts the supervisor;
from then on the engine works as an `HttpEngine`. The rollout uses the model of the plan that receives the trainer's
weights. Other models (a frozen reference, a judge) are only served, at the addresses of `args.sglang_model_routers`.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from slime_engine_http.api.engine import (
    DELTA,
    HttpEngine,
    check_adapters,
    check_sampling_mask,
    host_port,
    run_dir,
    without_deltas,
)
from slime_engine_http.api.router import Router
from slime_engine_http.api.transport import server_url
from slime_engine_http.api.versions import FIRST_ROUTER, TESTED_VERSIONS, untested, version_number
from slime_engine_http.api.worker import Worker, WorkerPool, WorkerState
from slime_engine_http.placement import find_device
from slime_engine_http.plan import LaunchPlan
from slime_engine_http.ports import url_host
from slime_engine_http.servers import Supervised
from slime_engine_http.service import DIRECTORY, Place, own_address

from slime_core.config.settings import Settings
from slime_core.errors import ConfigError, EngineError, WeightSyncError
from slime_core.protocols import Args
from slime_engine_sglang.adapters import SglangUpdates
from slime_engine_sglang.environment import (
    ROUTER_DISTRIBUTION,
    SERVER_DISTRIBUTION,
    engine_python,
    installed_versions,
    missing,
)
from slime_engine_sglang.flag_list import SERVER, flags_for
from slime_engine_sglang.fleet import Fleet, ModelFleet
from slime_engine_sglang.known_defects import check_model
from slime_engine_sglang.models_yaml import read_models
from slime_engine_sglang.planner import USES, check, make_plan, plan_of
from slime_engine_sglang.programs import PullerProcess

logger = logging.getLogger(__name__)

_ADDRESSES = ("sglang_model_routers", "sglang_router_ip", "sglang_router_port")
"""Settings that hold the addresses of the models from `start` to `stop`."""
_LEAVE_S = 10.0
"""Timeout in seconds for removing this run's servers from an external router."""


def _check_adapters(settings: Settings) -> None:
    """Raise ConfigError for settings that adapters in SGLang's LoRA layers exclude."""
    check_adapters(settings)
    args = settings.args
    if not args.lora_unmerged:
        return
    if args.update_weight_pause_mode not in (None, "abort"):
        raise ConfigError(
            f"{settings.cite('update_weight_pause_mode')}: SGLang replaces an adapter that no request uses; with"
            f" {settings.cite('lora_unmerged')} type abort, or leave it out."
        )
    if args.rollout_external_engine_addrs or args.update_weight_transport not in ("auto", "tensor"):
        other = "rollout_external_engine_addrs" if args.rollout_external_engine_addrs else "update_weight_transport"
        raise ConfigError(
            f"{settings.cite(other)}: SGLang takes adapters through memory that it shares with this run; remove it, or"
            f" {settings.cite('lora_unmerged')}."
        )


class SglangEngine(HttpEngine):
    """The engine class, constructed as `SglangEngine(args)`; `stop` ends every process that it launched."""

    weight_transports: tuple[str, ...] = ("tensor", "distributed", "disk")
    updates_class = SglangUpdates
    traits = replace(
        HttpEngine.traits,
        adds_adapters=True,
        takes_adapters=True,
        uses=USES
        | HttpEngine.traits.uses
        | {
            "engine_router",
            "engine_start_timeout",
            "offload_rollout",
            "rollout_max_engine_restarts",
        },
    )

    def __init__(self, args: Args) -> None:
        super().__init__(args)
        self._offloaded = []
        self.fleet: Fleet | None = None
        """The launched processes, from `start` until `stop` returns."""
        self._puller: PullerProcess | None = None
        self._needs_puller = args.update_weight_transport == DELTA and not self.pullers
        if self._needs_puller:
            self.weight_transports = (*self.weight_transports, DELTA)

    @classmethod
    def missing(cls, args: Args) -> str:
        """Return what is missing and the command that installs it; empty if SGLang's environment is complete."""
        return missing(args)

    @classmethod
    def check_settings(cls, settings: Settings) -> list[str]:
        """Return the plan's warnings. Raises ConfigError if the plan cannot work or SGLang's environment is missing."""
        python = engine_python(settings.args)
        check_sampling_mask(settings)
        _check_adapters(settings)
        if settings.args.use_sampling_mask:
            _check_mask_of_servers(settings)
        warnings = [*check(settings), *without_deltas(settings)]
        check_model(settings.args.hf_checkpoint, settings.cite("hf_checkpoint"))
        if settings.args.offload_rollout and find_device(settings.args.device)[0] == "cpu":
            warnings.append(
                f"{settings.cite('offload_rollout')}: SGLang frees GPU memory only (torch_memory_saver); servers on a"
                " CPU keep theirs"
            )
        versions = installed_versions(python)
        if warning := untested(versions[SERVER_DISTRIBUTION], f"{python} -m pip"):
            warnings.append(warning)
        router = versions.get(ROUTER_DISTRIBUTION, "")
        if settings.args.engine_router and (version_number(router) or (0, 0, 0)) < FIRST_ROUTER:
            problem = f"sglang-router {router} is too old" if router else "sglang-router is not installed"
            raise ConfigError(
                f"{settings.cite('engine_router')}: {problem} for {python}; type {python} -m pip install -U"
                " sglang-router, or --no-engine-router"
            )
        return warnings

    @classmethod
    def launch_plan(cls, settings: Settings, num_gpus: int | None = None) -> LaunchPlan:
        """Return the launch plan; the cluster need not exist. Raises ConfigError."""
        return plan_of(settings, num_gpus=num_gpus)

    @classmethod
    def planned_models(cls, args: Args) -> list[str]:
        """Return the names of the models of `--sglang-config` that are served. Raises ConfigError."""
        path = args.sglang_config
        return [] if path is None else [m.name for m in read_models(path, f"--sglang-config {path!r}") if m.serves]

    # -- memory ----------------------------------------------------------------------------------------

    async def release_memory(self, tags: Sequence[str] | None = None) -> None:
        """Release the memory of the rollout model's servers that this run launched; all requests wait.

        External servers, and servers without SGLang's memory saver (on CPUs and on unshared GPUs), keep their memory.
        """
        await self.flush_cache()  # waits until the servers are idle
        self._offloaded = [worker for worker in await self.can_release() if worker.owned]
        await super().release_memory(tags)

    async def resume_memory(self, tags: Sequence[str] | None = None) -> None:
        """Allocate the memory again; CUDA graphs come with the KV cache."""
        last = tags is None or "kv_cache" in tags
        await super().resume_memory([*tags, "cuda_graph"] if tags is not None and last else tags)
        if last:
            self._offloaded = []

    async def update_weights_from_delta(self, root: Path, version: int) -> dict[str, float]:
        """Update as in `HttpEngine`, but restart the puller first if it has died. Raises WeightSyncError."""
        if self._puller is not None and not self._puller.alive:
            logger.warning("the weight puller %s; starting it again", self._puller.last_words())
            try:
                await self._puller.launch()
            except EngineError as error:
                raise WeightSyncError(f"weight version {version}: {error}") from error
            self.pullers = [self._puller.url]
        return await super().update_weights_from_delta(root, version)

    # -- launching -------------------------------------------------------------------------------------

    async def _find_workers(self) -> tuple[WorkerPool, Router | None]:
        args = self._args
        python = engine_python(args)
        device, visible = find_device(args.device)
        plan = make_plan(args, device=device, num_gpus_visible=visible)
        toward = plan.main.router_address
        directory = run_dir(args) or Path(tempfile.mkdtemp(prefix="slime-engines-"))
        place = Place(
            python,
            directory / DIRECTORY,
            float(args.engine_start_timeout),
            own_address(toward[0] if toward is not None else None),
        )
        self.fleet = Fleet(plan, place)
        self._undo.callback(setattr, self, "fleet", None)
        self._undo.push_async_callback(_in_thread, self.fleet.stop)
        count = len(plan.servers)
        logger.info("starting %d SGLang servers on %s; logs in %s", count, device, directory / DIRECTORY)
        await self.fleet.launch()
        if self._needs_puller:
            assert args.update_weight_disk_dir is not None, "the rules of weight deltas see to both"
            assert args.update_weight_local_checkpoint_dir is not None
            self._puller = PullerProcess(
                Path(args.update_weight_disk_dir),
                Path(args.update_weight_local_checkpoint_dir),
                replace(place, host="127.0.0.1"),
                pull_timeout=float(args.update_weight_timeout),
            )
            self._undo.push_async_callback(_in_thread, self._puller.close)
            await self._puller.launch()
            self.pullers = [self._puller.url]
        found = {model.plan.name: await self._bring_in(model) for model in self.fleet.models}
        for name in _ADDRESSES:  # another start must find what this one found
            self._undo.callback(setattr, args, name, getattr(args, name))
        args.sglang_model_routers = {name: host_port(pool, router) for name, (pool, router) in found.items()}
        pool, router = found[plan.main.name]
        args.sglang_router_ip, args.sglang_router_port = host_port(pool, router)
        return pool, router

    async def _bring_in(self, model: ModelFleet) -> tuple[WorkerPool, Router | None]:
        """Return the pool and router of one model, after registering the servers at the router."""
        plan, servers = model.plan, model.workers()
        external = [Worker(server_url(address), state=WorkerState.READY) for address in plan.external]
        pool = WorkerPool([*servers, *external])
        router = None
        if plan.router_address is not None:
            host, port = plan.router_address
            router = Router(self.http, f"http://{url_host(host)}:{port}")
        elif model.router is not None:
            router = Router(self.http, model.router.url)
        if router is not None:
            if model.router is None:
                self._undo.push_async_callback(_leave, router, pool.workers)
            await asyncio.gather(*(router.add_worker(worker) for worker in pool.workers))
        self.supervised.append(
            Supervised(
                plan.name,
                pool,
                servers,
                router_url=None if router is None else router.url,
                router_process=model.router,
                catch_up=self.catch_up if plan.updates_weights else None,
                companions=[server for server in model.servers if server not in servers.values()],
            )
        )
        return pool, router


async def _in_thread(stop: Callable[[], None]) -> None:
    """Run `stop` in a thread, shielded from a cancellation of the calling task, e.g. by an interrupt of the start."""
    await asyncio.shield(asyncio.to_thread(stop))


async def _leave(router: Router, workers: Sequence[Worker]) -> None:
    """Remove this run's servers from an external router."""
    for worker in workers:
        try:
            await router.remove_worker(worker.url, timeout=_LEAVE_S)
        except EngineError as error:  # an external router's error must not fail the end of the run
            logger.warning("the router at %s still lists %s: %s", router.url, worker.url, error)


def _check_mask_of_servers(settings: Settings) -> None:
    """Raise ConfigError if the planned servers would refuse every request for a sampling mask."""
    args, name = settings.args, "sampling_mask_max_tokens"
    flag, asked = flags_for(args).field(SERVER, name), settings.cite("use_sampling_mask")
    if flag is None:
        version = installed_versions(engine_python(args))[SERVER_DISTRIBUTION]
        raise ConfigError(
            f"{asked}: SGLang {version} does not return what tokens are sampled among; {TESTED_VERSIONS[-1]} does"
        )
    most = int(getattr(args, SERVER + name, None) or flag.default)
    for top_k in ("rollout_top_k", "eval_top_k"):
        if (getattr(args, top_k) or 0) > most:
            raise ConfigError(
                f"{asked}: SGLang returns at most {most} ids of a token (--sglang-sampling-mask-max-tokens);"
                f" {settings.cite(top_k)} is beyond"
            )
