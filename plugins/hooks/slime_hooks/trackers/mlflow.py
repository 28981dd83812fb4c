"""MLflow: at `MLFLOW_TRACKING_URI`, or in `mlruns/` of the run directory."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from pathlib import PurePosixPath

from slime_hooks.trackers.numbers import Tracked, settings_of

_LONGEST = 500
"""Length of a parameter, in characters, that every store accepts."""
_AT_ONCE = 100
_OTHERS = re.compile(r"[^\w\-. :/]")
"""Characters not allowed in MLflow's metric names: `eval/aime-pass@8` becomes `eval/aime-pass_8`."""


class MLflow:
    """An MLflow run, in the experiment `MLFLOW_EXPERIMENT_NAME` or "slime"."""

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
