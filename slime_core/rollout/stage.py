"""Everything on the generation side behind synchronous calls: prompts in, train batches out.

The loop (`slime_core.loop`) holds one of these, or a stand-in with the same methods where the stage lives in another
process. The stage owns the event loop in which engine, generate functions and rewards run; that loop turns only while
one of the methods below is running.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from slime_core.data.dumps import dump_path, newest_version, to_json, write_samples
from slime_core.errors import CheckpointError, RolloutError
from slime_core.plugins.workers.threads import AbandonableThreadPool
from slime_core.protocols import RolloutEngine
from slime_core.rollout.batch import make_batch
from slime_core.rollout.contracts import eval_output, train_output
from slime_core.rollout.filters import FilterStage
from slime_core.rollout.gate import GatedEngine
from slime_core.rollout.generate import Generator, SampleRunner
from slime_core.rollout.hooks import RolloutHooks
from slime_core.rollout.metrics import eval_metrics, rollout_metrics
from slime_core.rollout.reward import RewardStage
from slime_core.rollout.schedule import RolloutContext
from slime_core.types import Group, TrainBatch

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

STATE_FILE = "data_source.json"
_BESIDE = AbandonableThreadPool(1, "slime-rollout")
"""For plain rollout functions."""
_CANCEL_DEADLINE = 10.0
"""Seconds an interrupted rollout gets to stop its requests before the engine goes away."""


@dataclass
class RolloutResult:
    """One rollout, ready for the trainer."""

    batch: TrainBatch
    metrics: dict[str, float]


@dataclass
class RolloutParts:
    """The resolved components a rollout stage is made of."""

    data_source: Any
    rollout_function: Callable[..., Any]
    eval_function: Callable[..., Any] | None
    """None where nothing can be evaluated: training on saved samples."""
    tokenizer: Any = None
    engine: RolloutEngine | None = None
    """None where the rollout function needs none (SFT)."""
    generator: Generator | None = None
    rewards: RewardStage | None = None
    filters: FilterStage | None = None
    resolve_generator: Callable[[str], Generator] | None = None
    estimator: Any = None
    """Shapes the rewards; None leaves them as they are."""
    post_process_rewards: Callable[..., Any] | None = None
    convert_samples: Callable[..., Any] | None = None
    needs_address: bool = False
    """User code may post to `args.sglang_router_ip` and `args.sglang_router_port`, so they must lead to the engine."""
    hooks: Any = None
    """pluggy's hook relay, or None."""
    user: RolloutHooks = field(default_factory=RolloutHooks)
    """The user's functions around a rollout."""


class RolloutStage:
    """Draws, generates, scores, filters and batches; also evaluates and takes new weights."""

    def __init__(self, args: Any, parts: RolloutParts) -> None:
        self.args = args
        self.parts = parts
        self.weight_version = 0
        self._loop = asyncio.Runner()
        self._warned = False
        self._context: RolloutContext | None = None
        self._task: asyncio.Task[Any] | None = None
        """The rollout or evaluation that runs, or was interrupted."""

    def start(self) -> None:
        """Bring up the engine, if there is one; returns when it serves."""
        if self.parts.engine is not None:
            self._loop.run(self._start(self.parts.engine))

    async def _start(self, engine: RolloutEngine) -> None:
        parts = self.parts
        assert parts.generator is not None
        assert parts.rewards is not None
        assert parts.filters is not None
        assert parts.resolve_generator is not None
        loading = asyncio.create_task(parts.rewards.start())  # worker processes come up beside the engine
        await engine.start()
        await loading
        if parts.needs_address:
            self.args.sglang_router_ip, self.args.sglang_router_port = await engine.address()
        parts.rewards.settings_changed()  # where models answer, which the engine has just found out
        # Requests that come over HTTP are not seen waiting, so the engine must not wait for their samples.
        gated = GatedEngine(
            engine,
            deterministic=self.args.deterministic_mode and not parts.needs_address,
            places=self.args.sglang_server_concurrency,
        )
        runner = SampleRunner(
            self.args, gated, parts.tokenizer, parts.generator, parts.rewards, parts.resolve_generator,
            greedy_baseline=getattr(parts.estimator, "needs_greedy_baseline", False), hooks=parts.user,
        )  # fmt: skip
        self._context = RolloutContext(runner, parts.filters)

    def stop(self) -> None:
        """Free engine and event loop; safe to call twice."""
        engine, self.parts.engine = self.parts.engine, None
        try:
            if engine is not None:
                self._loop.run(_stop(engine, self._task))
        finally:
            if self.parts.rewards is not None:
                self.parts.rewards.close()
            self._loop.close()

    # -- rollouts ------------------------------------------------------------------------------------

    def generate(self, rollout_id: int) -> RolloutResult:
        """One rollout. Raises RolloutError."""
        groups, metrics = self.generate_groups(rollout_id)
        args, parts = self.args, self.parts
        batch = make_batch(
            args,
            rollout_id,
            groups,
            parts.estimator,
            post_process_rewards=parts.post_process_rewards,
            convert_samples=parts.convert_samples,
            weight_version=self.weight_version,
        )
        return RolloutResult(batch, metrics)

    def generate_groups(self, rollout_id: int) -> tuple[list[Group], dict[str, float]]:
        """The samples of one rollout and its metrics, not yet a batch."""
        started = time.perf_counter()
        decided: list[Group] = []
        if self._context is not None and self.parts.user.process_all is not None:
            self._context.decided = decided
        self._tell_source("begin_rollout", rollout_id, self.weight_version)
        output = self._run_function(self.parts.rollout_function, rollout_id, evaluation=False)
        output = train_output(output)
        groups = output.samples
        if not any(groups):
            raise RolloutError(f"rollout {rollout_id}: the rollout function returned no samples")
        if self.args.load_debug_rollout_data:
            self.weight_version = newest_version(groups, self.weight_version)
        decided.sort(key=lambda g: g[0].group_index or 0)
        self.parts.user.after_rollout(self.args, groups, decided or groups, self.parts.data_source)
        self._tell_source("observe", groups, True)
        output.metrics |= self._tell_source("take_metrics") or {}
        seconds = time.perf_counter() - started
        if self.args.save_debug_rollout_data:
            path = dump_path(self.args.save_debug_rollout_data, rollout_id)
            write_samples(path, [s for g in groups for s in g], self.weight_version)
        metrics = self._describe(rollout_id, groups, output.metrics, seconds)
        if self.parts.hooks is not None:
            self.parts.hooks.slime_rollout_end(rollout_id=rollout_id, groups=groups, metrics=metrics)
        return groups, metrics

    def _describe(
        self, rollout_id: int, groups: list[Group], extra: dict[str, float], seconds: float
    ) -> dict[str, float]:
        """The rollout's metrics: ours, or those left in `extra` by a log function that says it has logged."""
        samples = [s for g in groups for s in g]
        held = 0.0
        if self._context is not None:
            held = self._context.runner.engine.take_held_seconds()
            self._warn_if_held(held, seconds)
        extra |= getattr(self.parts.engine, "take_metrics", dict)()
        log = self.parts.user.log_rollout
        if log is not None and log(rollout_id, self.args, samples, extra, seconds):
            return extra
        metrics = {**rollout_metrics(self.args, groups, self.weight_version), **extra}
        if metrics.get("rollout/routing_replay_fraction") == 0:
            logger.warning(
                "rollout %d: --use-rollout-routing-replay, but no sample says which experts the engine used; servers"
                " need --enable-return-routed-experts, generate functions append_response_tokens(meta_info=...)",
                rollout_id,
            )
        metrics["perf/rollout_time"] = seconds
        metrics["perf/tokens_per_sec"] = sum(s.response_length for s in samples) / seconds
        if self._context is not None:
            metrics["perf/engine_held_time"] = held
        return metrics

    def _tell_source(self, method: str, *details: Any) -> Any:
        """Call what a data source may have beside its protocol; None when it has it not."""
        found = getattr(self.parts.data_source, method, None)
        return None if found is None else found(*details)

    def _warn_if_held(self, held: float, seconds: float) -> None:
        """Say once that determinism costs this run a good part of its time."""
        if held > max(0.25 * seconds, 5.0) and not self._warned:
            self._warned = True
            logger.warning(
                "the engine was held %.0f of %.0f s while rewards or tools of other samples ran;"
                " --no-deterministic-mode lets it go on, at the price of bitwise reproducibility",
                held, seconds,
            )  # fmt: skip

    def evaluate(self, rollout_id: int) -> dict[str, float]:
        """`eval/...` metrics of all evaluation data sets; none where nothing can be evaluated."""
        if self.parts.eval_function is None:
            return {}
        data, extra = self.evaluate_samples(rollout_id)
        return self.eval_metrics(rollout_id, data, extra)

    def eval_metrics(
        self, rollout_id: int, data: dict[str, dict[str, Any]], extra: dict[str, float]
    ) -> dict[str, float]:
        """Metrics of evaluated samples; `--custom-eval-rollout-log-function-path` may stand in for them."""
        log = self.parts.user.log_eval
        if log is not None and log(rollout_id, self.args, data, extra):
            return extra
        return {**eval_metrics(data), **extra}

    def evaluate_samples(self, rollout_id: int) -> tuple[dict[str, dict[str, Any]], dict[str, float]]:
        """The evaluated samples per data set, and timing."""
        started = time.perf_counter()
        assert self.parts.eval_function is not None, "nothing to evaluate with"
        output = self._run_function(self.parts.eval_function, rollout_id, evaluation=True)
        output = eval_output(output)
        if self.args.save_debug_rollout_data:
            path = dump_path(self.args.save_debug_rollout_data, rollout_id, evaluation=True)
            write_samples(path, [s for columns in output.data.values() for s in columns.get("samples") or []])
        return output.data, {**output.metrics, "perf/eval_time": time.perf_counter() - started}

    def _run_function(self, function: Callable[..., Any], rollout_id: int, *, evaluation: bool) -> Any:
        keywords = {"context": self._context} if "context" in inspect.signature(function).parameters else {}
        call = (self.args, rollout_id, self.parts.data_source)
        is_async = inspect.iscoroutinefunction(function)
        start = functools.partial(function, *call, evaluation=evaluation, **keywords)
        if not is_async and not self.parts.needs_address:
            return start()
        results: list[Any] = []

        async def keep_result() -> None:
            self._task = asyncio.current_task()
            # Not returned by the task: asyncio's SIGINT handler holds the task, and `signal` formats handlers with
            # repr(), which would spell out every token of the rollout.
            # A plain function may post to the engine, which answers in this loop: it runs beside it.
            results.append(await (start() if is_async else _BESIDE.call(start)))

        self._loop.run(keep_result())
        return results[0]

    # -- weights -------------------------------------------------------------------------------------

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> Mapping[str, float] | None:
        """Hand tensors over; the engine copies them."""
        return self._update("tensor", weights, version)

    def update_weights_from_distributed(
        self, weights: Iterable[tuple[str, torch.Tensor]], version: int
    ) -> Mapping[str, float] | None:
        """Hand tensors over; the engine broadcasts them."""
        return self._update("distributed", weights, version)

    def update_weights_from_disk(self, path: Path, version: int) -> Mapping[str, float] | None:
        """Have the engine load an HF-layout directory."""
        return self._update("disk", path, version)

    def update_weights_from_delta(self, root: Path, version: int) -> Mapping[str, float] | None:
        """Have local copies brought to the version below `root`, and loaded."""
        return self._update("delta", root, version)

    def _update(self, transport: str, source: Any, version: int) -> Mapping[str, float] | None:
        """Call the engine's method for the transport; what it measured, if anything."""
        measured: Mapping[str, float] | None = None
        if self.parts.engine is not None:
            update = getattr(self.parts.engine, f"update_weights_from_{transport}")
            measured = self._loop.run(update(source, version))
        self.weight_version = version
        return measured

    @property
    def engines(self) -> list[RolloutEngine]:
        """The engine, or none; a list because THUDM/slime's functions get one."""
        return [] if self.parts.engine is None else [self.parts.engine]

    def differing_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> list[str] | None:
        """What an engine that compares weights itself finds; None when it does not."""
        compare = getattr(self.parts.engine, "differing_weights", None)
        return None if compare is None else list(self._loop.run(compare(weights)))

    def weight_checksums(self) -> dict[str, str]:
        """Of the weights served."""
        assert self.parts.engine is not None
        return self._loop.run(self.parts.engine.weight_checksums())

    @property
    def weight_transports(self) -> tuple[str, ...]:
        """How this stage's engine takes weights; empty without an engine."""
        return () if self.parts.engine is None else self.parts.engine.weight_transports

    # -- state ---------------------------------------------------------------------------------------

    def save(self, directory: Path, rollout_id: int) -> None:
        """Write data cursor and buffer below `directory`."""
        source = self.parts.data_source
        if hasattr(source, "state_dict"):
            state = {"weight_version": self.weight_version, "data_source": source.state_dict()}
            (directory / STATE_FILE).write_bytes(to_json(state, "the data source's state"))
        else:
            source.save(rollout_id)

    def load(self, directory: Path, rollout_id: int) -> None:
        """Inverse of `save`. Raises CheckpointError when the state is missing or of another data set."""
        source = self.parts.data_source
        if not hasattr(source, "load_state_dict"):
            source.load(rollout_id)
            return
        path = directory / STATE_FILE
        if not path.is_file():
            raise CheckpointError(f"{directory}: no {STATE_FILE}; the data cursor of the run is missing")
        state = orjson.loads(path.read_bytes())
        source.load_state_dict(state["data_source"])
        self.weight_version = state["weight_version"]


async def _stop(engine: RolloutEngine, task: asyncio.Task[Any] | None) -> None:
    if task is not None and not task.done():  # an interrupt that did not pass through the event loop
        task.cancel()
        await asyncio.wait({task}, timeout=_CANCEL_DEADLINE)
    await engine.stop()
