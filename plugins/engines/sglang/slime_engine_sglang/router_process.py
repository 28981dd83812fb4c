"""`ModelPlan.router` -> a running sglang-router, at one address for the whole run.

It starts without workers; `sglang_api.router.Router` adds them when they are ready, and again after a restart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slime_core.ports import PortBlock
from slime_engine_sglang.arguments import router_argv
from slime_engine_sglang.environment import SERVER_SIDE, server_environment
from slime_engine_sglang.service import Service

_GRACE_S = 4.0
_NEEDS_WORKERS = "power_of_two"
"""Policy that refuses to start with fewer than two workers."""


class RouterProcess(Service):
    """One router of this machine."""

    ready_path = "/liveness"
    """It has no need of workers for that."""

    def __init__(
        self,
        name: str,
        arguments: Mapping[str, Any],
        *,
        device: str,
        python: Path,
        log: Path,
        timeout: float,
        host: str = "127.0.0.1",
    ) -> None:
        """Reserves its ports, and starts nothing.

        Args:
            name: Of its model.
            arguments: `RouterArgs` field -> value, complete but for host, ports and workers; `port` when it was chosen.
            device: "cpu" or "cuda", for the environment of its interpreter.
            python: Interpreter of SGLang's environment.
            log: File for its output.
            timeout: Seconds until it must be ready.
            host: Address to listen at.

        Raises:
            EngineError: No ports are free.
        """
        self.arguments = dict(arguments)
        port = self.arguments.pop("port", None)
        self._device = device
        self._python = python
        self._initial: list[str] = []
        super().__init__(
            f"{name}/router",
            log,
            label=f"router of {name}",
            host=host,
            ports=2,
            timeout=timeout,
            port=port,
            grace=_GRACE_S,
        )

    @property
    def needs_workers(self) -> bool:
        """Whether its policy wants to know workers, which must be ready, before it starts: see `start_with`."""
        return self.arguments.get("policy") == _NEEDS_WORKERS

    def start_with(self, urls: Sequence[str]) -> None:
        """Workers for its next start, which its policy may need to begin at all; elsewhere they are added later."""
        self._initial = list(urls) if self.needs_workers else []

    def command(self, ports: PortBlock) -> list[str]:
        """`router_main.py`, which starts the router at once, with everything."""
        # The metrics port has a default that only one router of a machine can have, and the others panic.
        ours: dict[str, Any] = {
            "host": self.host, "port": ports[0], "prometheus_host": self.host, "prometheus_port": ports[1]
        }  # fmt: skip
        if self._initial:
            ours["worker_urls"] = self._initial
        argv = router_argv(self.arguments | ours, self._python)
        return [str(self._python), str(SERVER_SIDE / "router_main.py"), *argv]

    def environment(self) -> Mapping[str, str]:
        """That of SGLang's environment."""
        return server_environment(self._device, None, self._python)
