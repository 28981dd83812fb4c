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
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from slime_core.data.dumps import dump_path, newest_version, write_samples
from slime_core.data.ledger import Ledger, RecordedSource
from slime_core.errors import RolloutError, RolloutInterrupted
from slime_core.plugins.threads import AbandonableThreadPool
from slime_core.procs import leftovers
from slime_core.protocols import Args, RolloutEngine
from slime_core.rollout import stage_state
from slime_core.rollout.batch import make_batch, refuse_bad
from slime_core.rollout.contracts import eval_output, train_output
from slime_core.rollout.deadlines import StageRunner
from slime_core.rollout.engine_weights import deliver
from slime_core.rollout.evaluations import TIMEOUT, Interruptible, cancel_all, evaluated
from slime_core.rollout.gate import GatedEngine
from slime_core.rollout.generate import SampleRunner
from slime_core.rollout.loop_lag import LoopLag
from slime_core.rollout.metrics import eval_metrics, rollout_metrics
from slime_core.rollout.open_groups import OpenGroups
from slime_core.rollout.parts import RolloutParts as RolloutParts
from slime_core.rollout.parts import RolloutResult as RolloutResult
from slime_core.rollout.schedule import RolloutContext
from slime_core.types import Group, TrainBatch
from slime_core.waits import named, progress, waiting

if TYPE_CHECKING:
    import torch

    from slime_core.rollout.engine_memory import EngineMemory
    from slime_core.rollout.loop_thread import LoopThread
    from slime_core.rollout.producer import GroupProducer

T = TypeVar("T")
logger = logging.getLogger(__name__)

_PLAIN_CALLS = AbandonableThreadPool(1, "slime-rollout")
"""For plain rollout functions."""
_STOP_DEADLINE = 300.0
"""Seconds until the engine and everything beside it must have stopped."""


class RolloutStage:
    """Draws, generates, scores, filters and batches; also evaluates and takes new weights."""

    def __init__(self, args: Args, parts: RolloutParts, runner: asyncio.Runner | LoopThread | None = None) -> None:
        """`runner` turns the event loop; with a LoopThread several threads may call the stage at once."""
        self.args = args
        self.parts = parts
        self.weight_version = 0
        self._loop = runner or StageRunner()
        self._plain = threading.Lock()
        """Held by a plain rollout function, which need not bear another beside it."""
        self.ledger = Ledger()
        self.source: Any = None if parts.data_source is None else RecordedSource(parts.data_source, self.ledger)
        """What rollout functions draw from: the data source, which the ledger watches."""
        self.open_groups = OpenGroups()
        self.never_stops = False
        """Set before `start`: rollouts are taken out of a generation that goes on (`rollout.producer`)."""
        self._producer: GroupProducer | None = None
        """Generates without end, where that is so."""
        self.trail = stage_state.LedgerTrail()
        self._lag = LoopLag(counts=getattr(self._loop, "in_real_time", True))
        self._interrupted = False
        self._evaluations = Interruptible()
        self._context: RolloutContext | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        """The rollouts and evaluations that run, or were interrupted."""

    @named("the start of the engine", then="servers have --engine-start-timeout")
    def start(self) -> None:
        """Bring up the engine, if there is one and it is not up yet; returns when it serves.

        Raises CheckpointError for unfinished groups of a commit that have another size than this run's.
        """
        if self.parts.engine is not None and self._context is None:
            self._loop.run(self._start(self.parts.engine))
        if self.never_stops and self._producer is None:
            from slime_core.rollout.producer import OWNER, GroupProducer

            assert self._context is not None, "continuous generation needs an engine"
            self._producer = GroupProducer(self.args, self.source, self._context, lambda: self.weight_version)
            self.open_groups.register(OWNER, self._producer)
        stage_state.give_back(self, self.open_groups.take_unclaimed())

    async def _start(self, engine: RolloutEngine) -> None:
        parts = self.parts
        assert parts.generator is not None
        assert parts.rewards is not None
        assert parts.filters is not None
        assert parts.resolve_generator is not None
        leftovers.watch()  # from here on user code runs in this process
        loading = asyncio.create_task(parts.rewards.start())  # worker processes come up beside the engine
        await engine.start()
        with waiting("reward processes", deadline=None, then="they have deadlines of their own"):
            await loading
        if parts.needs_address:
            args = self.args
            args.sglang_router_ip, args.sglang_router_port = await engine.address()
            if args.rollout_num_gpus is None:  # as in THUDM/slime, whose functions multiply by it
                shared = (args.actor_num_nodes or 1) * (args.actor_num_gpus_per_node or 1)
                args.rollout_num_gpus = shared if args.colocate else 1
        parts.rewards.settings_changed()  # where models answer, which the engine has just found out
        # Requests that come over HTTP are not seen waiting, so the engine must not wait for their samples. Where
        # generation never stops, what shares an engine step depends on when the trainer was done.
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
        self._lag.follow(self._loop)
        self._context = RolloutContext(runner, parts.filters, ledger=self.ledger, eval_record=parts.eval_record)

    @named("the end of all rollouts", deadline=_STOP_DEADLINE, then="the run stops")
    def abandon(self) -> None:
        """End every rollout and evaluation that runs, and leave the engine up: `load` is to follow.

        Any thread may call it where a LoopThread turns the event loop. Raises RolloutError when a plain rollout
        function, which cannot be interrupted, goes on for too long.
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
        """What turns the event loop of an asynchronous run; other event loops await the stage through it."""
        from slime_core.rollout.loop_thread import LoopThread

        assert isinstance(self._loop, LoopThread)
        return self._loop

    def interrupt(self) -> None:
        """End the rollout and the evaluation that run, and every later one: both raise RolloutInterrupted.

        Any thread may call it, and a signal handler. A rollout function of the user's own that does not pass its
        `context` on to the built-in one is finished first, and so is a plain function that evaluates.
        """
        self._interrupted = True
        self._evaluations.interrupt()
        if self._context is not None:
            self._context.work.interrupt()

    # -- rollouts ------------------------------------------------------------------------------------

    def generate(self, rollout_id: int) -> RolloutResult:
        """One rollout. Raises RolloutError, and RolloutInterrupted after `interrupt`."""
        groups, metrics = self.generate_groups(rollout_id)
        return RolloutResult(self.make_batch(rollout_id, groups, self.weight_version), metrics)

    def before_push(self) -> None:
        """Nothing is generated ahead."""

    def before_save(self) -> None:
        """Nothing is generated ahead."""

    def make_batch(self, rollout_id: int, groups: list[Group], weight_version: int) -> TrainBatch:
        """Groups as the trainer gets them; `weight_version` is the one they will update."""
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

    @named("rollout {0}", then="its groups and samples have deadlines; --rollout-stall-timeout")
    def generate_groups(self, rollout_id: int) -> tuple[list[Group], dict[str, float]]:
        """The samples of one rollout and its metrics, not yet a batch. Raises as `generate`."""
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
            raise RolloutError(f"rollout {rollout_id}: the rollout function returned no samples")
        if self.args.load_debug_rollout_data:
            self.weight_version = newest_version(groups, self.weight_version)
        decided.sort(key=lambda g: g[0].group_index or 0)
        metrics = self.conclude(rollout_id, groups, decided or groups, output.metrics, started)
        self.ledger.settle()
        return groups, metrics

    def conclude(
        self, rollout_id: int, groups: list[Group], decided: list[Group], extra: dict[str, float], started: float
    ) -> dict[str, float]:
        """The end of a rollout: the user's functions, ledger, dumps; its metrics. Other groups may be in flight.

        Args:
            rollout_id: The rollout.
            groups: Go to training.
            decided: Those, and the ones that were dropped or failed meanwhile.
            extra: Metrics known already.
            started: `time.perf_counter()` when the rollout began.
        """
        self.parts.user.after_rollout(self.args, groups, decided, self.source, self.ledger.take_reasons())
        refuse_bad(self.args, rollout_id, [s for g in groups for s in g])  # here, so that dumps and metrics say so

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
        """The rollout's metrics: ours, or those left in `extra` by a log function that says it has logged."""
        samples = [s for g in groups for s in g]
        held = 0.0
        if self._context is not None:
            held = self._context.runner.engine.take_held_seconds(of=seconds)
        extra |= getattr(self.parts.engine, "take_metrics", dict)()
        if self.parts.user.log_rollout(rollout_id, self.args, samples, extra, seconds):
            return extra
        metrics = {**rollout_metrics(self.args, groups, self.weight_version), **extra}
        if metrics.get("rollout/routing_replay_fraction") == 0:
            logger.warning(
                "rollout %d: --use-rollout-routing-replay, but no sample says which experts the engine used; servers"
                " need --enable-return-routed-experts, generate functions append_response_tokens(meta_info=...)",
                rollout_id,
            )
        metrics["perf/rollout_time"] = seconds
        metrics |= self._lag.take()
        metrics["perf/tokens_per_sec"] = sum(s.response_length for s in samples) / seconds
        if self._context is not None:
            metrics["perf/engine_held_time"] = held
        return metrics

    def _ask_source(self, method: str, *details: Any) -> Any:
        """Call what a data source may have beside its protocol; None when it has it not."""
        found = getattr(self.parts.data_source, method, None)
        return None if found is None else found(*details)

    def evaluate(self, rollout_id: int) -> dict[str, float]:
        """`eval/...` metrics of all evaluation data sets; none where nothing can be evaluated."""
        if self.parts.eval_function is None:
            return {}
        data, extra = self.evaluate_samples(rollout_id)
        return self.eval_metrics(rollout_id, data, extra)

    def eval_metrics(
        self, rollout_id: int, data: dict[str, dict[str, Any]], extra: dict[str, float]
    ) -> dict[str, float]:
        """Metrics of evaluated samples; the hook `slime_log_eval` may stand in for them."""
        if self.parts.user.log_eval(rollout_id, self.args, data, extra):
            return extra
        return {**eval_metrics(data), **extra}

    @named("evaluation at rollout {0}", deadline="eval_timeout", then=TIMEOUT, stop=True)
    def evaluate_samples(self, rollout_id: int) -> tuple[dict[str, dict[str, Any]], dict[str, float]]:
        """The evaluated samples per data set, and timing. Raises RolloutError, RolloutInterrupted after `interrupt`."""
        if self._interrupted:
            raise RolloutInterrupted(drew=False)
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
        call = (self.args, rollout_id, self.source)
        is_async = inspect.iscoroutinefunction(function)
        start = functools.partial(function, *call, evaluation=evaluation, **keywords)
        if not is_async and not self.parts.needs_address:
            with self._plain:
                return start()
        results: list[Any] = []

        async def keep_result() -> None:
            task = asyncio.current_task()
            assert task is not None
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            # Not returned by the task: asyncio's SIGINT handler holds the task, and `signal` formats handlers with
            # repr(), which would spell out every token of the rollout.
            # A plain function may post to the engine, which answers in this loop: it runs beside it.
            running = start() if is_async else _PLAIN_CALLS.call(start)
            if evaluation and is_async:
                name = f"evaluation at rollout {rollout_id}"
                running = evaluated(self._evaluations, running, name, self.args.eval_timeout)
            with self._lag.counting():
                results.append(await running)

        self._loop.run(keep_result())
        return results[0]

    # -- memory and weights --------------------------------------------------------------------------

    @cached_property
    def _memory(self) -> EngineMemory:
        from slime_core.rollout.engine_memory import EngineMemory

        return EngineMemory()

    def release_memory(self) -> None:
        """Have the engine, which is idle, give up its memory; nothing where it has."""
        self._loop.run(self._memory.release(self.parts.engine))

    def resume_memory(self, tags: tuple[str, ...]) -> None:
        """Have it take a part of that again; nothing where it has."""
        self._loop.run(self._memory.resume(self.parts.engine, tags))

    def update_weights(self, transport: str, payload: Any, version: int) -> Mapping[str, float] | None:
        """Have the engine serve a version, from what its transport hands over; what it measured, if anything."""
        measured: Mapping[str, float] | None = None
        if self.parts.engine is not None:
            measured = self._loop.run(deliver(self.args, self.parts.engine, transport, payload, version))
        self.weight_version = self.ledger.weight_version = version
        if self._producer is not None:
            self.between_callbacks(self._producer.wake)
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
        """Write data cursor, buffer, open groups and ledger: see `rollout.stage_state`."""
        stage_state.save(self, directory, rollout_id)

    def load(self, directory: Path, rollout_id: int) -> str:
        """Inverse of `save`; says how many open groups come back, from which states. Raises CheckpointError."""
        return stage_state.load(self, directory, rollout_id)

    def between_callbacks(self, function: Callable[[], T]) -> T:
        """Call a plain function in the stage's event loop, so that nothing of the generation side moves meanwhile."""

        async def call() -> T:
            return function()

        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return self._loop.run(call())
        return function()
