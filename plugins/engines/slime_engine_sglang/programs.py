"""The programs that slime launches for SGLang: its servers, their routers, and the puller of weight deltas.

    plan + ports --> argv (`arguments`) --> guard --> python -m sglang.launch_server | router_main.py

A server is ready when it has generated a token (/health_generate) and serves the model of the plan. A router starts
without workers, at one address for the whole run. `api.router.Router` adds workers when they are ready, and again after
a restart. One puller per host serves all servers, which its requests name; it runs with slime's interpreter.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slime_engine_http.api.transport import MODEL_INFO, Http
from slime_engine_http.plan import ServerPlan
from slime_engine_http.ports import PortBlock, url_host
from slime_engine_http.servers import RouterService
from slime_engine_http.service import Place, Service, StrangerError

from slime_engine_sglang.arguments import attention_ranks, to_argv
from slime_engine_sglang.environment import SERVER_SIDE, server_environment
from slime_engine_sglang.flag_list import ROUTER

_SHARED = "/dev/shm/sglang_loads_"
"""Prefix of a file that each of SGLang's schedulers creates (its managers/load_snapshot.py) and never removes."""
_GRACE_S = 4.0
"""Seconds for a router or a puller to end."""
_DIST_PORTS = 30
"""Number of ports that SGLang derives from `dist_init_addr` (8 in 0.5.20, and one for each data-parallel rank)."""
_OPTIONAL_PORTS = {
    "language_only": "encoder_bootstrap_port",
    "remote_instance_weight_loader_start_seed_via_transfer_engine": "engine_info_bootstrap_port",
}
"""`ServerArgs` switch -> port that it opens; its default is the same number for all servers of a machine."""


class ServerProcess(Service):
    """An SGLang server on this machine."""

    def __init__(self, plan: ServerPlan, place: Place) -> None:
        """Reserve the ports without starting the server. Raises EngineError."""
        self.plan = plan
        self.arguments: dict[str, Any] = dict(plan.arguments)
        """`ServerArgs` fields except host and ports; additions take effect at the next start."""
        self._port_fields = ["port", "nccl_port"]
        if plan.worker_type == "prefill":  # the router gets this port, too
            self._port_fields.append("disaggregation_bootstrap_port")
        self._port_fields += [port for switch, port in _OPTIONAL_PORTS.items() if plan.arguments.get(switch)]
        ranks = attention_ranks(plan.arguments)
        self._dist_ports = _DIST_PORTS + ranks if ranks > 1 or plan.arguments.get("enable_dp_attention") else 0
        count = len(self._port_fields) + self._dist_ports
        super().__init__(plan.name, f"SGLang server {plan.name}", place, ports=count, shared=_SHARED)

    @property
    def bootstrap_port(self) -> int | None:
        """Return the port at which decode servers meet this prefill server; None for other servers."""
        name = "disaggregation_bootstrap_port"
        return self._ports[self._port_fields.index(name)] if name in self._port_fields else None

    def command(self, ports: PortBlock) -> list[str]:
        """Return the `python -m sglang.launch_server` command with all arguments."""
        fields = self.arguments | {"host": self.host}
        fields |= {name: ports[index] for index, name in enumerate(self._port_fields)}
        if self._dist_ports:  # the block from there on
            fields["dist_init_addr"] = f"{url_host(self.host)}:{ports[len(self._port_fields)]}"
        python = self._place.python
        return [str(python), "-m", "sglang.launch_server", *to_argv(fields, python)]

    def environment(self) -> Mapping[str, str]:
        """Return the environment of the plan."""
        return self.plan.environment

    async def check(self, http: Http, left: float) -> None:
        """Check the server. Raises StrangerError if it serves another model."""
        await http.send("GET", self.url, "/health_generate", timeout=left, attempts=1)
        if self.plan.worker_type == "encoder":
            return
        told = (await http.send("GET", self.url, MODEL_INFO, timeout=left, attempts=1)).object()
        found, wanted = told.get("model_path"), self.arguments.get("model_path")
        if found != wanted:
            raise StrangerError(
                f"SGLang server {self.name}: what answers at {self.url} serves model {found!r}, not {wanted!r}"
            )
        # On CPU each flush of the cache (one per weight update) collects garbage, which is fast once the objects of the
        # start are frozen. SGLang's own freeze comes too early when it skips its warm-up.
        await http.send("GET", self.url, "/freeze_gc", timeout=left, attempts=1, accept=range(600))


class RouterProcess(RouterService):
    """A router on this machine."""

    ready_path = "/liveness"
    """Readiness URL path, which works without workers."""

    def __init__(self, name: str, arguments: Mapping[str, Any], place: Place, *, device: str) -> None:
        """Reserve the ports without starting the router.

        Args:
            name: Name of the router's model.
            arguments: `RouterArgs` field -> value, without host, ports and workers; has `port` if the user chose it.
            place: Place of the run.
            device: "cpu" or "cuda", for the environment of the router's interpreter.

        Raises:
            EngineError: No ports are free.
        """
        self.arguments = dict(arguments)
        port = self.arguments.pop("port", None)
        self._device = device
        self._initial: list[str] = []
        super().__init__(f"{name}/router", f"router of {name}", place, ports=2, port=port, grace=_GRACE_S)

    @property
    def needs_workers(self) -> bool:
        """Return True if its policy needs two ready workers before the start: see `start_with`."""
        return self.arguments.get("policy") == "power_of_two"

    def start_with(self, urls: Sequence[str]) -> None:
        """Set the workers for the next start, for policies that need them; otherwise they are added later."""
        self._initial = list(urls) if self.needs_workers else []

    def command(self, ports: PortBlock) -> list[str]:
        """Return the `router_main.py` command, which starts the router at once, with all arguments."""
        # Only one router of a machine can use the default metrics port; the others would panic.
        ours: dict[str, Any] = {
            "host": self.host, "port": ports[0], "prometheus_host": self.host, "prometheus_port": ports[1]
        }  # fmt: skip
        if self._initial:
            ours["worker_urls"] = self._initial
        python = self._place.python
        return [str(python), str(SERVER_SIDE / "router_main.py"), *to_argv(self.arguments | ours, python, ROUTER)]

    def environment(self) -> Mapping[str, str]:
        """Return the variables for SGLang's Python environment."""
        return server_environment(self._device, None, self._place.python)


class PullerProcess(Service):
    """The puller of this machine: keeps `local_dir` at a version of `source`, for the servers in its requests."""

    def __init__(self, source: Path, local_dir: Path, place: Place, *, pull_timeout: float) -> None:
        """Reserve a port; `pull_timeout` is the limit in seconds to copy and load a version. Raises EngineError."""
        self._arguments = ["--source", str(source.absolute()), "--local-dir", str(local_dir.absolute())]
        self._arguments += ["--timeout", str(pull_timeout)]
        super().__init__("puller", "weight puller", place, ports=1, grace=_GRACE_S)

    def command(self, ports: PortBlock) -> list[str]:
        """Return the command of the puller, which listens on a port of its own."""
        where = ["--host", self.host, "--port", str(ports[0])]
        return [sys.executable, "-m", "slime_weight_transport_delta", *self._arguments, *where]
