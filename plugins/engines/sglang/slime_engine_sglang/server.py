"""A `ServerPlan` -> a running SGLang server.

    plan + ports --> argv (`arguments.to_argv`) --> guard --> python -m sglang.launch_server

Ready means that it has generated a token (/health_generate) and that its model is the one of the plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_core.ports import PortBlock, url_host
from slime_engine_sglang.api.transport import MODEL_INFO
from slime_engine_sglang.arguments import attention_ranks, to_argv
from slime_engine_sglang.plan import ServerPlan
from slime_engine_sglang.service import Service, StrangerError, get_json

if TYPE_CHECKING:
    import aiohttp

_DIST_PORTS = 30
"""SGLang derives ports from that of `dist_init_addr` (8 in 0.5.20, and one for each data-parallel rank)."""
_OPTIONAL_PORTS = {
    "language_only": "encoder_bootstrap_port",
    "remote_instance_weight_loader_start_seed_via_transfer_engine": "engine_info_bootstrap_port",
}
"""`ServerArgs` switch -> the port that it opens, whose default is one number for all servers of a machine."""


class ServerProcess(Service):
    """One SGLang server of this machine."""

    def __init__(
        self,
        plan: ServerPlan,
        *,
        python: Path,
        log: Path,
        timeout: float,
        host: str = "127.0.0.1",
    ) -> None:
        """Reserves its ports, and starts nothing.

        Args:
            plan: What to run.
            python: Interpreter of SGLang's environment.
            log: File for its output.
            timeout: Seconds until it must be ready.
            host: Address to listen at.

        Raises:
            EngineError: No ports are free.
        """
        self.plan = plan
        self.arguments: dict[str, Any] = dict(plan.arguments)
        """`ServerArgs` fields but for host and ports; what is added here holds from the next start on."""
        self._python = python
        self._port_fields = _port_fields(plan)
        count = len(self._port_fields) + _dist_ports(plan)
        label = f"SGLang server {plan.name}"
        super().__init__(plan.name, log, label=label, host=host, ports=count, timeout=timeout)

    @property
    def bootstrap_port(self) -> int | None:
        """Where decode servers meet this prefill server; None for others."""
        name = "disaggregation_bootstrap_port"
        return self._ports[self._port_fields.index(name)] if name in self._port_fields else None

    def command(self, ports: PortBlock) -> list[str]:
        """`python -m sglang.launch_server` with everything."""
        fields = self.arguments | {"host": self.host}
        fields |= {name: ports[index] for index, name in enumerate(self._port_fields)}
        if _dist_ports(self.plan):
            fields["dist_init_addr"] = f"{url_host(self.host)}:{ports[len(self._port_fields)]}"
        return [str(self._python), "-m", "sglang.launch_server", *to_argv(fields, self._python)]

    def environment(self) -> Mapping[str, str]:
        """The plan's."""
        return self.plan.environment

    async def missing(self, session: aiohttp.ClientSession, left: float) -> str:
        """Raises StrangerError when it is the server of another model."""
        status, _ = await get_json(session, f"{self.url}/health_generate", left)
        if status != 200:
            return f"{self.url}/health_generate to generate a token (status {status})"
        if self.plan.worker_type == "encoder":
            return ""
        status, body = await get_json(session, self.url + MODEL_INFO, left)
        if status != 200 or not isinstance(body, dict):
            return f"{self.url}{MODEL_INFO} to name its model (status {status})"
        found, wanted = body.get("model_path"), self.arguments.get("model_path")
        if found != wanted:
            raise StrangerError(
                f"SGLang server {self.name}: what answers at {self.url} serves model {found!r}, not {wanted!r}"
            )
        # Each flush of the cache, one per weight update, collects garbage on CPU: without what was there at the start
        # that takes no time. SGLang asks itself for it too early when it skips its warm-up.
        await get_json(session, f"{self.url}/freeze_gc", left)
        return ""


def _port_fields(plan: ServerPlan) -> list[str]:
    fields = ["port", "nccl_port"]
    if plan.needs_bootstrap_port:
        fields.append("disaggregation_bootstrap_port")
    return fields + [port for switch, port in _OPTIONAL_PORTS.items() if plan.arguments.get(switch)]


def _dist_ports(plan: ServerPlan) -> int:
    """Length of the block from `dist_init_addr` on; 0 where SGLang needs none."""
    ranks = attention_ranks(plan.arguments)
    return _DIST_PORTS + ranks if ranks > 1 or plan.arguments.get("enable_dp_attention") else 0
