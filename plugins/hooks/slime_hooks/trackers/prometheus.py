"""Prometheus: `/metrics` on this machine, with the newest value of every metric."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from slime_hooks.trackers.numbers import Tracked


class Prometheus:
    """An HTTP server for as long as the run."""

    def __init__(self, run: Tracked) -> None:
        from prometheus_client import CollectorRegistry, Gauge, start_http_server

        self._registry = CollectorRegistry()
        self._gauge, self._gauges = Gauge, dict[str, Any]()
        self._server, _ = start_http_server(run.options.prometheus_port, addr="127.0.0.1", registry=self._registry)
        if not run.options.prometheus_port:
            print(f"prometheus: http://127.0.0.1:{self._server.server_port}/metrics", flush=True)

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Set the gauges: `rollout/raw_reward` is `slime_rollout_raw_reward`."""
        for name, value in {"step": step, **metrics}.items():
            key = "slime_" + re.sub(r"\W+", "_", name)
            if key not in self._gauges:
                self._gauges[key] = self._gauge(key, name, registry=self._registry)
            self._gauges[key].set(value)

    def close(self) -> None:
        """End the server."""
        self._server.shutdown()
        self._server.server_close()
