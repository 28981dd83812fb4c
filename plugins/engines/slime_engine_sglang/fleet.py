"""Start the servers and routers of a `LaunchPlan` concurrently, and end them together.

    for each model at once:  router  |  encoders, then the servers that get the encoders' URLs

Ports are reserved when the fleet is created, so every URL is known before any process runs. A server that has to change
its ports has another URL when it is ready.
"""

from __future__ import annotations

from dataclasses import dataclass

from slime_engine_http.api.worker import Worker, WorkerState
from slime_engine_http.plan import LaunchPlan, ModelPlan
from slime_engine_http.service import Place, Service, stop_all, together

from slime_engine_sglang.programs import RouterProcess, ServerProcess


@dataclass
class ModelFleet:
    """The servers and the router of one model."""

    plan: ModelPlan
    servers: list[ServerProcess]
    router: RouterProcess | None

    def workers(self) -> dict[Worker, ServerProcess]:
        """Return the ready servers that generate: the first node of each engine, without encoders."""
        return {
            Worker(
                s.url, owned=True, role=s.plan.worker_type, state=WorkerState.READY, bootstrap_port=s.bootstrap_port
            ): s
            for s in self.servers
            if s.plan.node_rank == 0 and s.plan.worker_type != "encoder"
        }

    async def launch(self) -> None:
        """Start everything and wait until it is ready. Raises EngineError."""
        router = self.router
        if router is not None and not router.needs_workers:
            return await together([router.launch(), self._launch_servers()])
        await self._launch_servers()
        if router is not None:
            router.start_with([worker.url for worker in self.workers()])
            await router.launch()

    async def _launch_servers(self) -> None:
        encoders = [server for server in self.servers if server.plan.worker_type == "encoder"]
        told = [server for server in self.servers if server.plan.needs_encoder_urls]
        others = [server for server in self.servers if server not in encoders and server not in told]
        await together([self._launch_with(encoders, told), *(server.launch() for server in others)])

    async def _launch_with(self, encoders: list[ServerProcess], told: list[ServerProcess]) -> None:
        await together([server.launch() for server in encoders])
        for server in told:
            server.arguments["encoder_urls"] = [encoder.url for encoder in encoders]
        await together([server.launch() for server in told])


class Fleet:
    """All servers and routers that a run starts on this machine."""

    def __init__(self, plan: LaunchPlan, place: Place) -> None:
        """Reserve the ports without starting anything. Raises EngineError if a port is taken."""
        self.models: list[ModelFleet] = []
        try:
            for model in plan.models:
                fleet = ModelFleet(model, [], None)
                self.models.append(fleet)
                fleet.servers += (ServerProcess(server, place) for server in model.servers)
                if model.router is not None:
                    fleet.router = RouterProcess(model.name, model.router, place, device=plan.device)
        except BaseException:
            self.stop()
            raise

    async def launch(self) -> None:
        """Start everything and wait until it is ready; the caller must call `stop` even if this fails.

        Raises:
            EngineError: Of the first that did not come up.
        """
        await together([model.launch() for model in self.models])

    def stop(self) -> None:
        """End everything concurrently; nothing runs when it returns. Safe to call twice. Raises EngineError."""
        running: list[Service] = [server for model in self.models for server in model.servers]
        running += [model.router for model in self.models if model.router is not None]
        stop_all(running)
