"""The generation side behind synchronous calls: prompts in, train batches out.

The training loop (`slime_core.loop`) holds a stage, or a proxy with the same methods if the stage is in another
process. The stage owns the event loop in which engine, generate functions and rewards run. The event loop runs only
while one of the methods below is running.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from slime_core.data.dumps import dump_path, newest_version, write_samples
from slime_core.data.ledger import Ledger, RecordedSource
from slime_core.distributions import offered, provided
from slime_core.errors import RolloutError, RolloutInterrupted, rollout_name
from slime_core.plugins.resolve import resolve
from slime_core.protocols import AdvantageEstimator, Args, RolloutEngine
from slime_core.rollout import state
from slime_core.rollout.batch import ConvertSamples, RewardPostProcess, make_batch, refuse_bad
from slime_core.rollout.deadlines import TIMEOUT, Interruptible, cancel_all, ended, evaluated
from slime_core.rollout.event_loop import LoopLag, LoopThread, StageRunner
from slime_core.rollout.fate import FilterStage
from slime_core.rollout.gate import GatedEngine
from slime_core.rollout.generate import SampleRunner, Timeline
from slime_core.rollout.hooks import RolloutHooks
from slime_core.rollout.pool import RolloutContext, shape_of
from slime_core.rollout.reward import RewardStage, number_problem
from slime_core.sample import Group, RolloutFnEvalOutput, RolloutFnTrainOutput, Sample, SampleStatus, TrainBatch
from slime_core.waits import named, progress, waiting
from slime_core.workers import leftovers
from slime_core.workers.call import on_thread

if TYPE_CHECKING:
    import torch

    from slime_core.plugins.adapters import GenerateCaller
    from slime_core.rollout.evaluate import EvalRecord
    from slime_core.rollout.producer import GroupProducer


T = TypeVar("T")
logger = logging.getLogger(__name__)

_MEMORY = ("weights", "kv_cache")
"""Parts of the engine's memory, in the order of resumption."""
_STOP_DEADLINE = 300.0
"""Seconds until the engine and everything that runs with it must have stopped."""


@dataclass
class RolloutResult:
    """The batch and the metrics of one rollout, ready for the trainer."""

    batch: TrainBatch
    metrics: dict[str, float]


@dataclass
class RolloutParts:
    """The resolved components of a rollout stage."""

    data_source: Any
    rollout_function: Callable[..., Any]
    eval_function: Callable[..., Any] | None
    """Evaluation function; None for training on saved samples, where evaluation is impossible."""
    tokenizer: Any = None
    engine: RolloutEngine | None = None
    """Rollout engine; None if the rollout function needs no engine (SFT)."""
    generator: GenerateCaller | None = None
    rewards: RewardStage | None = None
    filters: FilterStage | None = None
    resolve_generator: Callable[[str], GenerateCaller] | None = None
    estimator: AdvantageEstimator | None = None
    """Estimator that shapes the rewards; None leaves them unchanged."""
    post_process_rewards: RewardPostProcess | None = None
    convert_samples: ConvertSamples | None = None
    needs_address: bool = False
    """True if user code may post to `args.sglang_router_ip` and `args.sglang_router_port`; the engine serves there."""
    hooks: Any = None
    """Hook relay of pluggy, or None."""
    timeline: Timeline | None = None
    """Timeline that records when samples began and ended."""
    eval_record: EvalRecord | None = None
    """Record of the finished groups of a resumable evaluation."""
    user: RolloutHooks = field(default_factory=RolloutHooks)
    """Hooks around a rollout."""


class RolloutStage:
    """The rollout stage: draws, generates, scores, filters and batches; also evaluates and loads new weights."""

    def __init__(self, args: Args, parts: RolloutParts, runner: asyncio.Runner | LoopThread | None = None) -> None:
        """`runner` runs the event loop; with a LoopThread several threads may call the stage at once."""
        self.args = args
        self.parts = parts
        self.weight_version = 0
        self._loop = runner or StageRunner()
        self._plain = threading.Lock()
        """Held while a plain rollout function runs: such functions need not be thread-safe."""
        self.ledger = Ledger()
        self.source: Any = None if parts.data_source is None else RecordedSource(parts.data_source, self.ledger)
        """Data source that rollout functions draw from, recorded by the ledger."""
        self.open_groups = state.OpenGroups()
        self.never_stops = False
        """Set before `start`. True: rollouts are taken from continuous generation (`rollout.producer`)."""
        self._producer: GroupProducer | None = None
        """The continuous generation, if `never_stops`."""
        self.trail = state.LedgerTrail()
        lag = offered("slime.metrics", "loop_lag")
        self._lag: LoopLag | None = lag and lag(counts=getattr(self._loop, "in_real_time", True))
        self._released: set[str] = set()
        """Parts of its memory that the engine has released; kept here, since the loop may start again after a trainer's
        failure in the middle of a step."""
        self._interrupted = False
        self._evaluations = Interruptible()
        self._context: RolloutContext | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        """Rollouts and evaluations that are running, or were interrupted."""

    @named("the start of the engine", then="servers have --engine-start-timeout")
    def start(self) -> None:
        """Start the engine, if there is one and it is not running yet, and wait until it serves.

        Raises:
            CheckpointError: Unfinished groups of a commit have another size than this run's groups.
        """
        if self.parts.engine is not None and self._context is None:
            self._loop.run(self._start(self.parts.engine))
        if self.never_stops and self._producer is None:
            from slime_core.rollout.producer import OWNER, GroupProducer

            assert self._context is not None, "continuous generation needs an engine"
            self._producer = GroupProducer(self.args, self.source, self._context, lambda: self.weight_version)
            self.open_groups.register(OWNER, self._producer)
        state.give_back(self, self.open_groups.take_unclaimed())

    async def _start(self, engine: RolloutEngine) -> None:
        parts = self.parts
        assert parts.generator is not None
        assert parts.rewards is not None
        assert parts.filters is not None
        assert parts.resolve_generator is not None
        leftovers.watch()  # from here on user code runs in this process
        loading = asyncio.create_task(parts.rewards.start())  # worker processes start while the engine starts
        try:
            await engine.start()
        except BaseException:
            await ended({loading})
            raise
        with waiting("reward processes", deadline=None, then="they have deadlines of their own"):
            await loading
        if parts.needs_address:
            args = self.args
            args.sglang_router_ip, args.sglang_router_port = await engine.address()
            if args.rollout_num_gpus is None:  # as in THUDM/slime, whose functions multiply by it
                shared = (args.actor_num_nodes or 1) * (args.actor_num_gpus_per_node or 1)
                args.rollout_num_gpus = shared if args.colocate else 1
        parts.rewards.settings_changed()  # addresses of models, which the engine knows since its start
        # HTTP requests are not seen while they wait, so the engine must not wait for their samples. If generation
        # never stops, the trainer's timing decides which requests share an engine step.
        gated = GatedEngine(
            engine,
            deterministic=self.args.deterministic_mode and not parts.needs_address and not self.never_stops,
            places=self.args.sglang_server_concurrency,
        )
        runner = SampleRunner(
            self.args, gated, parts.tokenizer, parts.generator, parts.rewards, parts.resolve_generator,
            greedy_baseline=getattr(parts.estimator, "needs_greedy_baseline", False), hooks=parts.user,
        )  # fmt: skip
        runner.timeline = parts.timeline
        if self._lag:
            self._lag.follow(self._loop)
        self._context = RolloutContext(runner, parts.filters, ledger=self.ledger, eval_record=parts.eval_record)

    @named("the end of all rollouts", deadline=_STOP_DEADLINE, then="the run stops")
    def abandon(self) -> None:
        """End every running rollout and evaluation, and leave the engine running; the caller calls `load` next.

        Any thread may call it if a LoopThread runs the event loop.

        Raises:
            RolloutError: A plain rollout function, which cannot be interrupted, keeps running for too long.
        """
        self._loop.run(self._end())
        if not self._plain.acquire(timeout=_STOP_DEADLINE):
            raise RolloutError(f"the rollout function did not end within {_STOP_DEADLINE:.0f} s")
        self._plain.release()
        self.open_groups.clear()

    @named("the end of the engine", deadline=_STOP_DEADLINE, then="the process ends", stop=True)
    def stop(self) -> None:
        """Free engine and event loop; safe to call twice."""
        engine, self.parts.engine = self.parts.engine, None
        try:
            if engine is not None:
                self._loop.run(self._end(then=engine.stop))
        finally:
            if self.parts.rewards is not None:
                self.parts.rewards.close()
            if self.parts.timeline:
                self.parts.timeline.flush()
            self._loop.close()

    async def _end(self, then: Callable[[], Awaitable[None]] | None = None) -> None:
        producer, self._producer = self._producer, None
        try:
            if producer is not None:
                await producer.stop()
        finally:
            await cancel_all(self._tasks, then=then)

    def loop_thread(self) -> LoopThread:
        """Return the thread of an asynchronous run's event loop; other event loops await the stage through it."""
        assert isinstance(self._loop, LoopThread)
        return self._loop

    def interrupt(self) -> None:
        """End the running rollout and evaluation, and every later one: they raise RolloutInterrupted.

        Any thread and any signal handler may call it. Two functions finish first: a user's own rollout function that
        does not pass its `context` to the built-in one, and a plain function that evaluates.
        """
        self._interrupted = True
        self._evaluations.interrupt()
        if self._context is not None:
            self._context.work.interrupt()

    # -- rollouts ------------------------------------------------------------------------------------

    def generate(self, rollout_id: int) -> RolloutResult:
        """Run one rollout. Raises RolloutError, and RolloutInterrupted after `interrupt`."""
        groups, metrics = self.generate_groups(rollout_id)
        return RolloutResult(self.make_batch(rollout_id, groups, self.weight_version), metrics)

    def before_push(self) -> None:
        """Do nothing: this stage generates nothing ahead."""

    def before_save(self) -> None:
        """Do nothing: this stage generates nothing ahead."""

    def make_batch(self, rollout_id: int, groups: list[Group], weight_version: int) -> TrainBatch:
        """Return the groups as the trainer's batch; `weight_version` is the version that the batch will update."""
        self.ledger.training(rollout_id, groups, weight_version)
        return make_batch(
            self.args,
            rollout_id,
            groups,
            self.parts.estimator,
            post_process_rewards=self.parts.post_process_rewards,
            convert_samples=self.parts.convert_samples,
            weight_version=weight_version,
        )

    @named("{0}", then="its groups and samples have deadlines; --rollout-stall-timeout")
    def generate_groups(self, rollout_id: int) -> tuple[list[Group], dict[str, float]]:
        """Return the groups of one rollout, not yet a batch, and its metrics. Raises the errors of `generate`."""
        if self.never_stops:
            assert self._producer is not None, "start comes first"
            taken = self._loop.run(self._producer.take(rollout_id))
            return taken.groups, self.conclude(rollout_id, *taken)
        if self._interrupted:
            raise RolloutInterrupted(drew=False)
        started = time.perf_counter()
        decided: list[Group] = []
        if self._context is not None and self.parts.user.wants_all_groups:
            self._context.decided = decided
        progress(rollout_id=rollout_id, weight_version=self.weight_version)
        self._ask_source("begin_rollout", rollout_id, self.weight_version)
        output = train_output(self._run_function(self.parts.rollout_function, rollout_id, evaluation=False))
        groups = output.samples
        if not any(groups):
            raise RolloutError(f"{rollout_name(rollout_id)}: the rollout function returned no samples")
        if self.args.load_debug_rollout_data:
            self.weight_version = newest_version(groups, self.weight_version)
        decided.sort(key=lambda g: g[0].group_index or 0)
        metrics = self.conclude(rollout_id, groups, decided or groups, output.metrics, started)
        self.ledger.settle()
        return groups, metrics

    def conclude(
        self, rollout_id: int, groups: list[Group], decided: list[Group], extra: dict[str, float], started: float
    ) -> dict[str, float]:
        """Finish a rollout: user functions, ledger, dumps. Return its metrics. Other groups may be in flight.

        Args:
            rollout_id: Number of the rollout.
            groups: Groups for training.
            decided: `groups`, and the groups that were dropped or failed meanwhile.
            extra: Metrics that are already known.
            started: `time.perf_counter()` when the rollout began.
        """
        self.parts.user.after_rollout(self.args, groups, decided, self.source, self.ledger.take_reasons())
        refuse_bad(self.args, rollout_id, [s for g in groups for s in g])  # before dumps and metrics

        def tell() -> dict[str, float]:
            self.ledger.taken(rollout_id, groups, weight_version=self.weight_version)
            self._ask_source("observe", groups, True)
            return self._ask_source("take_metrics") or {}

        extra = {**extra, **self.between_callbacks(tell)}
        seconds = time.perf_counter() - started
        if self.args.save_debug_rollout_data:
            path = dump_path(self.args.save_debug_rollout_data, rollout_id)
            write_samples(path, [s for g in groups for s in g], self.weight_version)
        metrics = self._describe(rollout_id, groups, extra, seconds)
        if self.parts.hooks is not None:
            self.parts.hooks.slime_rollout_end(rollout_id=rollout_id, groups=groups, metrics=metrics)
        return metrics

    def _describe(
        self, rollout_id: int, groups: list[Group], extra: dict[str, float], seconds: float
    ) -> dict[str, float]:
        """Return the rollout's metrics, or only `extra` if a log function has replaced slime's logging."""
        samples = [s for g in groups for s in g]
        held = 0.0
        if self._context is not None:
            held = self._context.runner.engine.take_held_seconds(of=seconds)
        extra |= getattr(self.parts.engine, "take_metrics", dict)()
        replaced = self.parts.user.told.slime_log_rollout(
            rollout_id=rollout_id, args=self.args, samples=samples, extra_metrics=extra, rollout_time=seconds
        )
        if any(replaced):
            return extra
        reported = provided("slime.metrics", "reported")
        metrics = {**reported.rollout_metrics(self.args, groups, self.weight_version), **extra}
        if metrics.get("rollout/routing_replay_fraction") == 0:
            logger.warning(
                "%s: --use-rollout-routing-replay, but no sample says which experts the engine used; servers"
                " need --enable-return-routed-experts, generate functions append_response_tokens(meta_info=...)",
                rollout_name(rollout_id),
            )
        metrics["perf/rollout_time"] = seconds
        metrics |= self._lag.take() if self._lag else {}
        metrics["perf/tokens_per_sec"] = sum(s.response_length for s in samples) / seconds
        if self._context is not None:
            metrics["perf/engine_held_time"] = held
        return metrics

    def _ask_source(self, method: str, *details: object) -> Any:
        """Call an optional method of the data source; return None if the method does not exist."""
        found = getattr(self.parts.data_source, method, None)
        return None if found is None else found(*details)

    def evaluate(self, rollout_id: int) -> dict[str, float]:
        """Evaluate and return `eval/...` metrics of all evaluation data sets; empty if nothing can be evaluated."""
        if self.parts.eval_function is None:
            return {}
        data, extra = self.evaluate_samples(rollout_id)
        return self.eval_metrics(rollout_id, data, extra)

    def eval_metrics(
        self, rollout_id: int, data: Mapping[str, Mapping[str, object]], extra: dict[str, float]
    ) -> dict[str, float]:
        """Return metrics of evaluated samples; the hook `slime_log_eval` may replace them."""
        told = self.parts.user.told
        if any(told.slime_log_eval(rollout_id=rollout_id, args=self.args, data=data, extra_metrics=extra)):
            return extra
        return {**provided("slime.metrics", "reported").eval_metrics(data), **extra}

    @named("evaluation at {0}", deadline="eval_timeout", then=TIMEOUT, stop=True)
    def evaluate_samples(self, rollout_id: int) -> tuple[dict[str, dict[str, Any]], dict[str, float]]:
        """Return evaluated samples per data set, and timing. Raises RolloutError, RolloutInterrupted if interrupted."""
        if self._interrupted:
            raise RolloutInterrupted(drew=False)
        started = time.perf_counter()
        assert self.parts.eval_function is not None, "nothing to evaluate with"
        output = eval_output(self._run_function(self.parts.eval_function, rollout_id, evaluation=True))
        if self.args.save_debug_rollout_data:
            path = dump_path(self.args.save_debug_rollout_data, rollout_id, evaluation=True)
            write_samples(path, [s for columns in output.data.values() for s in columns.get("samples") or []])
        return output.data, {**output.metrics, "perf/eval_time": time.perf_counter() - started}

    def _run_function(self, function: Callable[..., Any], rollout_id: int, *, evaluation: bool) -> object:
        keywords = {"context": self._context} if "context" in inspect.signature(function).parameters else {}
        call = (self.args, rollout_id, self.source)
        is_async = inspect.iscoroutinefunction(function)
        start = functools.partial(function, *call, evaluation=evaluation, **keywords)
        if not is_async and not self.parts.needs_address:
            with self._plain:
                return start()
        results: list[object] = []

        async def keep_result() -> None:
            task = asyncio.current_task()
            assert task is not None
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            # Not returned by the task: asyncio's SIGINT handler holds the task, and `signal` formats handlers with
            # repr(), which would spell out every token of the rollout.
            # A plain function may post to the engine, which replies in this loop: the function needs its own thread.
            running = start() if is_async else on_thread(start)
            if evaluation and is_async:
                name = f"evaluation at {rollout_name(rollout_id)}"
                running = evaluated(self._evaluations, running, name, self.args.eval_timeout)
            with self._lag.counting() if self._lag else nullcontext():
                results.append(await running)

        self._loop.run(keep_result())
        return results[0]

    # -- memory and weights --------------------------------------------------------------------------

    def release_memory(self) -> None:
        """Make the idle engine release its memory (`--offload-rollout`); do nothing if it already has.

        Raises:
            EngineError: The engine failed.
        """
        self._loop.run(self._release(self.parts.engine))

    async def _release(self, engine: Any) -> None:
        if engine is not None and not self._released:
            with waiting("the engine to give up its memory", deadline=None, then="its requests have deadlines"):
                await engine.abort()  # requests that a timeout or a user's function left behind
                await engine.release_memory()
            self._released = set(_MEMORY)

    def resume_memory(self, tags: tuple[str, ...]) -> None:
        """Make the engine allocate parts of its memory again; do nothing if it already has. Raises EngineError."""
        self._loop.run(self._resume(self.parts.engine, tags))

    async def _resume(self, engine: Any, tags: tuple[str, ...]) -> None:
        missing = [tag for tag in tags if tag in self._released]
        if engine is not None and missing:
            with waiting("the engine to take its memory again", deadline=None, then="its requests have deadlines"):
                await engine.resume_memory(missing)
            self._released -= set(missing)

    def update_weights(self, transport: str, payload: object, version: int) -> Mapping[str, float] | None:
        """Make the engine serve a version from its transport's payload. Return measurements, if any."""
        measured: Mapping[str, float] | None = None
        if self.parts.engine is not None:
            measured = self._loop.run(deliver(self.args, self.parts.engine, transport, payload, version))
        self.weight_version = self.ledger.weight_version = version
        if self._producer is not None:
            self.between_callbacks(self._producer.wake)
        return measured

    @property
    def engines(self) -> list[RolloutEngine]:
        """Engines of the stage, at most one; a list because THUDM/slime's functions get one."""
        return [] if self.parts.engine is None else [self.parts.engine]

    def differing_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> list[str] | None:
        """Return the names of differing weights, if the engine can compare weights; None if it cannot."""
        compare = getattr(self.parts.engine, "differing_weights", None)
        return None if compare is None else list(self._loop.run(compare(weights)))

    def weight_checksums(self) -> dict[str, str]:
        """Return the checksums of the served weights."""
        assert self.parts.engine is not None
        return self._loop.run(self.parts.engine.weight_checksums())

    @property
    def weight_transports(self) -> tuple[str, ...]:
        """Weight transports that this stage's engine supports; empty without an engine."""
        return () if self.parts.engine is None else self.parts.engine.weight_transports

    # -- state ---------------------------------------------------------------------------------------

    def save(self, directory: Path, rollout_id: int) -> None:
        """Write data cursor, buffer, open groups and ledger: see `rollout.state`."""
        state.save(self, directory, rollout_id)

    def load(self, directory: Path, rollout_id: int) -> str:
        """Restore the state of `save`; return how many open groups come back, by state. Raises CheckpointError."""
        return state.load(self, directory, rollout_id)

    def between_callbacks(self, function: Callable[[], T]) -> T:
        """Call a plain function in the stage's event loop, so that nothing of the generation side moves meanwhile."""

        async def call() -> T:
            return function()

        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return self._loop.run(call())
        return function()


async def deliver(
    args: Args, engine: RolloutEngine, transport: str, payload: object, version: int
) -> Mapping[str, float] | None:
    """Load a version by the engine's own method for the transport, else by the transport's engine side.

    Returns metrics, if there are any.

    Args:
        args: The run's settings.
        engine: A started engine.
        transport: Spec of the transport: a name, `dist:name`, `file.py:attr`, ...
        payload: The object that the transport's `send` passed to `take`.
        version: Number of the version.

    Raises:
        WeightSyncError: The engine refused the weights.
    """
    name = transport.rpartition(":")[2]
    update = getattr(engine, f"update_weights_from_{name}", None)
    if update is None:
        update = partial(resolve("weight_transports", transport).obj.deliver, args, engine)
    measured: Mapping[str, float] | None = await update(payload, version)
    return measured


# -- what rollout functions return -------------------------------------------------------------------


def train_output(answer: Any) -> RolloutFnTrainOutput:
    """Check a rollout function's result for training: a `RolloutFnTrainOutput` or THUDM/slime's bare list of groups."""
    output = answer if isinstance(answer, RolloutFnTrainOutput) else RolloutFnTrainOutput(answer)
    if not isinstance(output.samples, list) or not isinstance(output.metrics, Mapping):
        raise RolloutError(
            "--rollout-function-path: must return RolloutFnTrainOutput(samples, metrics) or a list of groups;"
            f" it returned {shape_of(answer)}"
        )
    return RolloutFnTrainOutput([flatten(group) for group in output.samples], dict(output.metrics))


def eval_output(answer: Any) -> RolloutFnEvalOutput:
    """Check a rollout function's result for evaluation: `{data set: {"rewards", "truncated", "samples"}}`.

    A reward that is not a finite number becomes 0.0 and its sample FAILED; without samples, `failed` counts them.
    """
    output = answer if isinstance(answer, RolloutFnEvalOutput) else RolloutFnEvalOutput(answer)
    expected = "--eval-function-path or --rollout-function-path: must return {name: {'rewards': [], 'truncated': []}}"
    if not isinstance(output.data, Mapping):
        raise RolloutError(f"{expected}; it returned {shape_of(answer)}")
    for name, columns in output.data.items():
        if not isinstance(columns, Mapping) or "rewards" not in columns or "truncated" not in columns:
            raise RolloutError(f"{expected}; for {name!r} it returned {shape_of(columns)}")
    return RolloutFnEvalOutput({n: _scored(n, columns) for n, columns in output.data.items()}, output.metrics)


def _scored(name: str, columns: Mapping[str, Any]) -> dict[str, object]:
    rewards, samples = list(columns["rewards"]), columns.get("samples") or []
    problems = [number_problem(reward) for reward in rewards]
    failed = sum(problem is not None for problem in problems)
    if not failed:
        return dict(columns)
    first = next(place for place, problem in enumerate(problems) if problem is not None)
    logger.warning(
        "--eval-function-path: %d of %d rewards of %r are no finite numbers (the first is number %d: %r); they count"
        " as 0 and as failed",
        *(failed, len(rewards), name, first, rewards[first]),
    )
    if len(samples) == len(rewards):
        for sample, problem in zip(samples, problems):
            if problem is not None and sample.status != SampleStatus.FAILED:
                sample.fail("--eval-function-path", f"its reward {problem}")
    scored = [0.0 if problem is not None else reward for reward, problem in zip(rewards, problems)]
    return {**columns, "rewards": scored, "failed": failed}


def flatten(group: Any) -> Group:
    """Return the samples of a group of samples or lists of fan-out siblings, in order. Raises RolloutError."""
    if isinstance(group, Sample):
        return [group]
    if not isinstance(group, list):
        raise RolloutError(f"--rollout-function-path: a group must be a list of Samples; found {shape_of(group)}")
    return [sample for item in group for sample in flatten(item)]
