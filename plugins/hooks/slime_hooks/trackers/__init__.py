"""Trackers: send a run's metrics to TensorBoard, Weights & Biases and others. The hooks of all trackers are here.

Each tracker is a class in a separate module, which does not depend on slime's hooks, and runs on a separate thread
(`worker.py`): a tracker that hangs or fails loses its numbers, but the run continues. `--use-tensorboard` and
`--use-wandb` choose the two trackers with flags, `plugins.trackers.use` chooses the others. Trackers get numbers, and
texts of samples only if `plugins.trackers.texts` is set.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from slime_core import Args, PluginOptions, Sample, hookimpl, options
from slime_core.errors import ConfigError
from slime_hooks.trackers.numbers import Rollout, Tracked, of_rollout
from slime_hooks.trackers.worker import Worker

__all__ = ["Options", "Trackers"]


class _Kind(NamedTuple):
    module: str
    """Module of the package that the tracker needs."""
    target: str
    asked: str
    """Flag that chooses the tracker; empty without a flag."""


_KINDS = {
    "tensorboard": _Kind("tensorboard", "slime_hooks.trackers.tensorboard:TensorBoard", "--use-tensorboard"),
    "wandb": _Kind("wandb", "slime_hooks.trackers.wandb:Wandb", "--use-wandb"),
    "mlflow": _Kind("mlflow", "slime_hooks.trackers.mlflow:MLflow", ""),
    "trackio": _Kind("trackio", "slime_hooks.trackers.trackio:Trackio", ""),
    "prometheus": _Kind("prometheus_client", "slime_hooks.trackers.prometheus:Prometheus", ""),
    "otel": _Kind("opentelemetry.sdk", "slime_hooks.trackers.otel:OpenTelemetry", ""),
}


class Options(PluginOptions):
    """Options of the plugin: `--set plugins.trackers.use=[mlflow]`."""

    use: list[Literal["mlflow", "trackio", "prometheus", "otel"]] = Field(default=[])
    """Trackers besides the two with flags."""
    texts: Annotated[int, Field(ge=0)] = 0
    """Number of samples, from the start of each rollout, whose prompt and response are sent to trackers."""
    prometheus_port: Annotated[int, Field(ge=0, le=65535)] = 9464
    """Port of /metrics on this machine; 0: a free one, which is printed."""
    deadline: Annotated[float, Field(gt=0)] = 20.0
    """Seconds that the end of a run waits for a tracker to write its queue."""


class Trackers:
    """The hooks of a process."""

    def __init__(self) -> None:
        self._workers: list[Worker] = []
        self._options = Options()

    @hookimpl
    def slime_configure(self, args: Args) -> None:
        """Refuse trackers that are not installed; move the key of Weights & Biases to its environment variable."""
        self._options = options(args, "trackers", Options)
        for name in self._chosen(args):
            kind = _KINDS[name]
            if not _installed(kind.module):
                asked = kind.asked or f"plugins.trackers.use {name}"
                raise ConfigError(f"{asked} needs {kind.module.partition('.')[0]}: pip install 'slime-rl[{name}]'")
        if "otel" in self._options.use:
            import_module("slime_hooks.trackers.otel").check(trace_kept=args.trace)
        if args.use_wandb and args.wandb_key:
            os.environ["WANDB_API_KEY"], args.wandb_key = args.wandb_key, None

    @hookimpl
    def slime_run_start(self, args: Args, run_dir: Path) -> None:
        """Start a thread for each tracker, which opens there."""
        began = time.time()
        for name in self._chosen(args):
            make = _loader(_KINDS[name].target)
            worker = Worker(name, self._options.deadline)
            worker.start(make, Tracked(args, run_dir, self._options, began))
            self._workers.append(worker)

    @hookimpl(trylast=True)  # the run's own record reports errors of its directory first
    def slime_log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Queue the metrics of a step for every tracker."""
        numbers = {name: float(value) for name, value in metrics.items()}
        for worker in self._workers:
            worker.put("metrics", step, numbers)

    @hookimpl
    def slime_log_rollout(self, rollout_id: int, args: Args, samples: list[Sample]) -> None:
        """Queue distributions and optional texts of a rollout; a separate rollout process has no trackers."""
        if self._workers:
            found: Rollout = of_rollout(args, rollout_id, samples, self._options.texts)
            for worker in self._workers:
                worker.put("rollout", found)

    @hookimpl
    def slime_run_end(self, error: BaseException | None) -> None:
        """Wait until the trackers have written their queues, up to the deadline."""
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.close()

    def _chosen(self, args: Args) -> list[str]:
        wanted = args.use_tensorboard
        tensorboard = _installed(_KINDS["tensorboard"].module) if wanted is None else wanted
        return [*["tensorboard"] * tensorboard, *["wandb"] * args.use_wandb, *self._options.use]


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False


def _loader(target: str) -> Callable[..., Any]:
    def make(*values: Any) -> Any:
        module, _, name = target.partition(":")
        return getattr(import_module(module), name)(*values)

    return make
