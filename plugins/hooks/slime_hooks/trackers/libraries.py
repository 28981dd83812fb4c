"""MLflow, trackio and Prometheus: each class imports its library when it is built."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from slime_hooks.trackers.numbers import Tracked, settings_of

_LONGEST = 500
"""Length of a parameter, in characters, that every store accepts."""
_AT_ONCE = 100
_OTHERS = re.compile(r"[^\w\-. :/]")
"""Characters not allowed in MLflow's metric names: `eval/aime-pass@8` becomes `eval/aime-pass_8`."""


class MLflow:
    """An MLflow run, at `MLFLOW_TRACKING_URI` or in `RUN/mlruns`; experiment `MLFLOW_EXPERIMENT_NAME`."""

    def __init__(self, run: Tracked) -> None:
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        if "MLFLOW_TRACKING_URI" not in os.environ:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        uri = os.environ.get("MLFLOW_TRACKING_URI") or (run.run_dir / "mlruns").resolve().as_uri()
        self._client = MlflowClient(uri)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "slime")
        experiment = self._client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment else self._client.create_experiment(name)
        self._run = self._client.create_run(number, run_name=run.run_dir.resolve().name).info.run_id
        params = [Param(key, str(value)[:_LONGEST]) for key, value in settings_of(run.args).items()]
        for first in range(0, len(params), _AT_ONCE):
            self._client.log_batch(self._run, params=params[first : first + _AT_ONCE])

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a step."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        # In a file store a name is a path: `eval/aime` with `eval/aime/response_len/max` would be a file and a folder.
        folders = {str(parent) for name in metrics for parent in PurePosixPath(name).parents}
        names = {name: f"{name}/value" if name in folders else name for name in metrics}
        named = {_OTHERS.sub("_", names[name]): value for name, value in metrics.items()}
        self._client.log_batch(self._run, metrics=[Metric(name, value, now, step) for name, value in named.items()])

    def close(self) -> None:
        """End the run."""
        self._client.set_terminated(self._run)


class Prometheus:
    """`/metrics` on this machine, for as long as the run: the newest value of every metric."""

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


class Trackio:
    """A run in trackio's project "slime", in a local database (`TRACKIO_DIR`) that `trackio show` shows."""

    def __init__(self, run: Tracked) -> None:
        import trackio

        self._run = trackio.init(
            project="slime", name=run.run_dir.resolve().name, config=settings_of(run.args), resume="allow", embed=False
        )

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a step."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """End the run."""
        self._run.finish()
