"""The puller of weight deltas as a child beside the servers that slime launches: one per host, for all of them.

`SglangEngine` starts it when weights travel as deltas. It runs with slime's interpreter, not with that of SGLang's
environment, and its requests name the servers, which may come back at other ports.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from slime_core.ports import PortBlock
from slime_engine_sglang.service import Service

_GRACE_S = 4.0


class PullerProcess(Service):
    """The puller of this machine."""

    def __init__(
        self, source: Path, local_dir: Path, *, log: Path, timeout: float, pull_timeout: float, host: str = "127.0.0.1"
    ) -> None:
        """Reserves its port, and starts nothing.

        Args:
            source: Directory of weight versions.
            local_dir: The copy it keeps.
            log: File for its output.
            timeout: Seconds until it must be ready.
            pull_timeout: Seconds that bringing and loading a version may take.
            host: Address to listen at.

        Raises:
            EngineError: No port is free.
        """
        self._source, self._local_dir, self._pull_timeout = source, local_dir, pull_timeout
        super().__init__("puller", log, label="weight puller", host=host, ports=1, timeout=timeout, grace=_GRACE_S)

    def command(self, ports: PortBlock) -> list[str]:
        """The puller, for servers that its requests name."""
        return [
            *(sys.executable, "-m", "slime_weight_transport_delta"),
            *("--source", str(self._source.absolute()), "--local-dir", str(self._local_dir.absolute())),
            *("--host", self.host, "--port", str(ports[0]), "--timeout", str(self._pull_timeout)),
        ]

    def environment(self) -> Mapping[str, str]:
        """Nothing of its own."""
        return {}
