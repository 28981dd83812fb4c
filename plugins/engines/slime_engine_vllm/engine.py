"""The engine `vllm`: launches vLLM servers, or uses those that run already, and generates through them.

Client, supervision and weight updates are `slime_engine_http`'s. This package adds the plan of the servers (`launch`),
the form of requests for tokens (`wire`), control calls (`calls`), and a transfer of weights inside vLLM
(`server_side`). There is no router: the client chooses a server for each session.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from slime_engine_http.api.engine import HttpEngine, check_adapters, run_dir
from slime_engine_http.api.router import Router
from slime_engine_http.api.transport import Http, server_url
from slime_engine_http.api.worker import Worker, WorkerPool, WorkerState
from slime_engine_http.placement import is_planned_later
from slime_engine_http.plan import LaunchPlan
from slime_engine_http.servers import Supervised
from slime_engine_http.service import DIRECTORY, Place, own_address, stop_all, together

from slime_core.config.settings import Settings
from slime_core.errors import ConfigError
from slime_core.protocols import Args
from slime_engine_vllm.calls import VllmHttp
from slime_engine_vllm.environment import VLLM, untested
from slime_engine_vllm.front import Served, serve
from slime_engine_vllm.launch import VllmServer, check_plan, make_plan
from slime_engine_vllm.text import Text
from slime_engine_vllm.weights import VllmUpdates
from slime_engine_vllm.wire import VllmWire

logger = logging.getLogger(__name__)


class VllmEngine(HttpEngine):
    """The engine class, constructed as `VllmEngine(args)`; `stop` ends every process that it launched."""

    weight_transports: tuple[str, ...] = ("tensor", "distributed", "disk")
    http_class: ClassVar[type[Http]] = VllmHttp
    updates_class = VllmUpdates
    warn_untested = staticmethod(untested)
    traits = replace(
        HttpEngine.traits,
        runs_elsewhere=False,
        returns_routed_experts=False,
        returns_sampling_mask=False,
        takes_images=False,
        adds_adapters=True,
        takes_adapters=True,
        uses=(HttpEngine.traits.uses - {"update_weight_puller_addrs"})
        | {
            "actor_num_nodes",
            "actor_num_gpus_per_node",
            "engine_start_timeout",
            "num_gpus_per_node",
            "rollout_max_engine_restarts",
            "rollout_num_gpus",
            "rollout_num_gpus_per_engine",
        },
    )

    def __init__(self, args: Args) -> None:
        super().__init__(args)
        self._text = Text(args.hf_checkpoint)
        self.wire = VllmWire(self._text.decode, self.adapters)
        self._front: Served | None = None

    @classmethod
    def missing(cls, args: Args) -> str:
        """Return what is missing and the command that installs it; empty if vLLM's environment is complete."""
        return "" if args.rollout_external_engine_addrs else VLLM.missing(args)

    @classmethod
    def check_settings(cls, settings: Settings) -> list[str]:
        """Return the plan's warnings. Raises ConfigError if the plan cannot work or vLLM's environment is missing."""
        check_adapters(settings)
        warnings = [] if is_planned_later(settings) else list(check_plan(settings).warnings)
        if not settings.args.rollout_external_engine_addrs:
            python = VLLM.engine_python(settings.args)
            (version, *_) = VLLM.installed_versions(python).values()
            warnings += filter(None, [untested(version, f"{python} -m pip")])
        return warnings

    @classmethod
    def launch_plan(cls, settings: Settings, num_gpus: int | None = None) -> LaunchPlan:
        """Return the launch plan. Raises ConfigError."""
        if not settings.args.hf_checkpoint:
            raise ConfigError("--hf-checkpoint is required: a directory in Hugging Face layout.")
        return make_plan(settings.args, num_gpus=num_gpus, origins=settings.origins)

    async def address(self) -> tuple[str, int]:
        """Serve SGLang's HTTP API on a free port in this event loop until `stop`.

        vLLM's servers do not speak it. Raises EngineError if no server plugin is installed.
        """
        if self._front is None:
            self._front = await serve(self, self._args, self._text.tokenizer)
            self._undo.push_async_callback(self._close_front)
        return self._front[:2]

    async def _close_front(self) -> None:
        front, self._front = self._front, None
        if front is not None:
            await front[2]()

    # -- launching -------------------------------------------------------------------------------------

    async def _find_workers(self) -> tuple[WorkerPool, Router | None]:
        args = self._args
        (model,) = make_plan(args).models
        if model.external:
            workers = [Worker(server_url(address), state=WorkerState.READY) for address in model.external]
            return WorkerPool(workers), None
        directory = run_dir(args) or Path(tempfile.mkdtemp(prefix="slime-engines-"))
        place = Place(
            VLLM.engine_python(args), directory / DIRECTORY, float(args.engine_start_timeout), own_address(None)
        )
        servers: list[VllmServer] = []
        self._undo.push_async_callback(_end, servers)
        servers += (VllmServer(plan, model.model_path, place) for plan in model.servers)
        logger.info("starting %d vLLM servers; logs in %s", len(servers), directory / DIRECTORY)
        await together([server.launch() for server in servers])
        found = {Worker(server.url, owned=True, state=WorkerState.READY): server for server in servers}
        pool = WorkerPool(list(found))
        self.supervised.append(Supervised(model.name, pool, found, catch_up=self.catch_up))
        return pool, None


async def _end(servers: list[VllmServer]) -> None:
    """End the servers, shielded from a cancellation of the calling task, e.g. by an interrupt of the start."""
    await asyncio.shield(asyncio.to_thread(stop_all, servers))
