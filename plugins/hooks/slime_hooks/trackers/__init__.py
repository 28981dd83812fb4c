"""Trackers: send a run's metrics to TensorBoard, Weights & Biases and others. The hooks of all trackers are here.

Each tracker is a class in a separate module, which does not depend on slime's hooks, and runs on a separate thread
(`Worker`): a tracker that hangs or fails loses its numbers, but the run continues. `--use-tensorboard` and
`--use-wandb` choose the two trackers with flags, `plugins.trackers.use` chooses the others. Trackers get numbers, and
texts of samples only if `plugins.trackers.texts` is set.

A thread and a queue for each tracker, which never blocks the run; its exceptions are logged as warnings.

::

    hooks --put--> queue (bounded) --> thread: open, metrics, rollout, ... close
                     | full: the newest message is lost, and counted
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
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
    "mlflow": _Kind("mlflow", "slime_hooks.trackers.libraries:MLflow", ""),
    "trackio": _Kind("trackio", "slime_hooks.trackers.libraries:Trackio", ""),
    "prometheus": _Kind("prometheus_client", "slime_hooks.trackers.libraries:Prometheus", ""),
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


logger = logging.getLogger(__name__)

_ROOM = 1000
"""Size of the queue in messages; a tracker with a full queue counts as hanging."""
_MOST_FAILURES = 5
"""Consecutive failures after which a tracker is not called any more."""


class Worker:
    """The run's handle of a tracker and its thread."""

    def __init__(self, name: str, deadline: float) -> None:
        """`deadline` is the time in seconds that `close` waits."""
        self._name, self._deadline = name, deadline
        self._queue: queue.Queue[tuple[str, tuple[Any, ...]] | None] = queue.Queue(_ROOM)
        self._thread: threading.Thread | None = None
        self._lost = self._failures = 0
        self._ended = False

    def start(self, make: Callable[..., Any], *values: Any) -> None:
        """Start the thread, which constructs the tracker as `make(*values)`."""
        work = threading.Thread(target=self._work, args=(make, values), name=f"slime-{self._name}", daemon=True)
        work.start()
        self._thread = work

    def put(self, method: str, *values: Any) -> None:
        """Queue a call of the tracker's method, and return at once."""
        if self._ended:
            self._lost += 1
            return
        try:
            self._queue.put_nowait((method, values))
        except queue.Full:
            self._lost += 1
            if self._lost == 1:
                logger.warning("tracker %s is %d messages behind; what follows is lost to it", self._name, _ROOM)

    def close(self) -> None:
        """Wait for the thread to finish; after the deadline abandon it with a warning."""
        if self._thread is None:
            return
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=self._deadline)
        self._thread.join(self._deadline)
        if self._thread.is_alive():
            logger.warning(
                "tracker %s has not ended within %g s (plugins.trackers.deadline); %d messages are lost to it",
                self._name, self._deadline, self._queue.qsize() + self._lost,
            )  # fmt: skip
        elif self._lost:
            logger.warning("tracker %s: %d messages are lost to it", self._name, self._lost)

    # -- in the thread -------------------------------------------------------------------------------------

    def _work(self, make: Callable[..., Any], values: tuple[Any, ...]) -> None:
        try:
            tracker = make(*values)
        except BaseException as error:  # SystemExit of a library included: the thread is all that ends
            self._ended = True
            logger.warning("tracker %s cannot start: %s: %s", self._name, type(error).__name__, _line(error))
            return
        while (message := self._queue.get()) is not None and not self._ended:
            self._do(getattr(tracker, message[0], None), message[1])
        self._do(tracker.close, ())

    def _do(self, call: Callable[..., None] | None, values: tuple[Any, ...]) -> None:
        try:
            if call is not None:
                call(*values)
                self._failures = 0
        except BaseException as error:
            self._failures += 1
            self._lost += 1
            self._ended = self._failures >= _MOST_FAILURES
            if self._failures == 1 or self._ended:
                end = "; it is asked no more" if self._ended else ""
                logger.warning("tracker %s: %s: %s%s", self._name, type(error).__name__, _line(error), end)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
