"""The rollout stage in an actor: draws, generates, scores, filters, batches; receives weights and passes them on.

A threaded actor. It has a concurrency group per kind of caller: "work" for the loop's calls, "turns" and "evaluation"
for the asynchronous loop's concurrent calls, "weights" and "buckets" for the trainer's rank 0, "control" for health
checks and interrupts. All calls run in the stage's single event loop (`rollout.event_loop`). A batch is not returned
but stays in the object store, from which the trainer's actors read it; the driver only passes the reference on.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_core.errors import RolloutError, RolloutInterrupted
from slime_core.sample import Group, TrainBatch
from slime_launcher_ray.receiver import Streams
from slime_launcher_ray.shell import Shell, travels
from slime_launcher_ray.wait import Member

if TYPE_CHECKING:
    from slime_core.rollout.event_loop import LoopThread
    from slime_core.rollout.stage import RolloutStage
    from slime_launcher_ray.engine_restart import EngineRestart


class _Samples:
    """Stand-in for the hooks: keeps the samples of a rollout for the driver's hooks."""

    def __init__(self) -> None:
        self._kept: dict[int, list[Group]] = {}

    def slime_rollout_end(self, *, rollout_id: int, groups: list[Group], metrics: dict[str, float]) -> None:
        """Keep the groups of the finished rollout."""
        self._kept[rollout_id] = groups

    def take(self, rollout_id: int) -> list[Group] | None:
        """Return the kept groups, if any, and forget earlier rollouts. A commit's ready rollout is returned again."""
        self._kept = {kept: groups for kept, groups in self._kept.items() if kept >= rollout_id}
        return self._kept.get(rollout_id)


class RolloutActor(Shell):
    """An actor with the rollout stage of the run's settings."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._stage: RolloutStage | None = None
        self._loop: LoopThread
        self._rollout: Any
        """Generator of rollouts: the stage, or with `--async` its wrapper, which runs in `_ahead_loop`."""
        self._ahead_loop: LoopThread
        self._samples = _Samples()
        self._restarter: EngineRestart | None = None
        """Restarts the engine's actor, with `--use-fault-tolerance`."""
        self._streams = Streams(self.order.settings.args.distributed_timeout_minutes * 60.0)

    @property
    def stage(self) -> RolloutStage:
        """The stage; `build` must have been called."""
        assert self._stage is not None, "build() comes first"
        return self._stage

    @travels
    def build(
        self,
        engine: Member | None,
        tell_groups: bool,
        engine_facts: Mapping[str, Any] | None = None,
        several_nodes: bool = False,
    ) -> int | None:
        """Construct the stage. Return the run's number of rollouts if the data determines it, else None.

        Args:
            engine: Actor of the engine; None: the engine is in this process, or external.
            tell_groups: True if the driver has hooks that need the samples of a rollout.
            engine_facts: Facts that the engine's actor reported when it was opened.
            several_nodes: True if the run's actors are on more than one node.
        """
        from slime_core.launch.drive import rollouts_of
        from slime_core.rollout.ahead import Ahead
        from slime_core.rollout.event_loop import LoopThread
        from slime_launcher_ray.engine_proxy import proxy_class
        from slime_launcher_ray.engine_restart import EngineRestart

        run = self.prepared
        if engine is not None:
            if run.args.use_fault_tolerance and engine_facts is not None:
                self._restarter = EngineRestart(
                    run.args, self.order.run_dir, engine, self.code, engine_facts, several_nodes=several_nodes
                )
            run.parts.engine = proxy_class(run.parts.engine, engine, self._restarter)
        self._loop = LoopThread()
        self._stage = run.rollout_stage()
        self._stage.parts.hooks = self._samples if tell_groups else None  # the driver has the run's hooks
        self._rollout = self._stage
        if run.args.async_training:
            self._ahead_loop = LoopThread("slime-async-rollout")
            self._rollout = Ahead(run.args, self._stage)
        if run.args.num_rollout is None:
            run.args.num_rollout = rollouts_of(run.args, self._stage.parts.data_source)
            return int(run.args.num_rollout)
        return None

    def _done(self, work: Any) -> Any:
        """Return the result of a stage method: `work` itself, or its result if `work` is a coroutine."""
        return self._ahead_loop.run(work) if inspect.iscoroutine(work) else work

    # -- the loop's calls ------------------------------------------------------------------------------------

    @travels
    def start(self) -> None:
        """Start the engine."""
        self._done(self._rollout.start())

    @travels
    def generate(self, rollout_id: int) -> tuple[TrainBatch | None, dict[str, Any], list[Group] | None]:
        """Run one rollout. Return the batch, a report for the driver, and the samples if the driver wants them."""
        try:
            result = self._done(self._rollout.generate(rollout_id))
        except RolloutInterrupted as interrupted:
            return None, {"interrupted": interrupted.drew}, None
        batch: TrainBatch = result.batch
        told = {"metrics": result.metrics, "size": (len(batch), sum(map(len, batch.tokens)))}
        return batch, told, self._samples.take(rollout_id)

    @travels
    def evaluate(self, rollout_id: int) -> dict[str, float] | None:
        """Evaluate and return `eval/...` metrics; None if interrupted."""
        try:
            metrics: dict[str, float] = self._done(self._rollout.evaluate(rollout_id))
            return metrics
        except RolloutInterrupted:
            return None
        except asyncio.CancelledError:
            raise RolloutError("the evaluation was ended: the run goes back to a commit") from None

    @travels
    def before_push(self) -> None:
        """Wait until the engines may take new weights."""
        self._done(self._rollout.before_push())

    @travels
    def before_save(self) -> None:
        """Wait until what has been generated ahead can be part of a commit."""
        self._done(self._rollout.before_save())

    @travels
    def release_memory(self) -> None:
        """Make the engine release its memory."""
        self.stage.release_memory()

    @travels
    def resume_memory(self, tags: tuple[str, ...]) -> None:
        """Make the engine allocate parts of its memory again."""
        self.stage.resume_memory(tags)

    @travels
    def save(self, directory: Path, rollout_id: int) -> None:
        """Save the generation side's part of a commit."""
        self.stage.save(directory, rollout_id)

    @travels
    def load(self, directory: Path, rollout_id: int) -> str:
        """Restore the state that `save` wrote; return a short description of it."""
        return self.stage.load(directory, rollout_id)

    @travels
    def abandon(self) -> None:
        """End all running work and keep the engine, since a trainer died; the caller then calls `load` with a commit.

        Called in the "control" group, concurrently with the work that it ends.
        """
        from slime_core.rollout.ahead import Ahead

        self._streams.give_up()
        self._done(self._rollout.abandon())
        if self._rollout is not self._stage:
            self._rollout = Ahead(self.prepared.args, self.stage)

    def engine_facts(self) -> Mapping[str, Any] | None:
        """Return the facts that the engine's actor reported when last opened; None if it is never restarted."""
        return None if self._restarter is None else self._restarter.facts

    def interrupt(self) -> None:
        """End the rollout in progress and give back everything drawn."""
        if self._stage is not None:
            self._stage.interrupt()

    def stop(self) -> None:
        """Free engine, workers and event loop; safe to call twice."""
        stage, self._stage = self._stage, None
        if stage is not None:
            self._done(self._rollout.stop())
            if self._rollout is not stage:
                self._ahead_loop.close()
            self.prepared.hooks.slime_run_end(error=None)

    # -- weights ---------------------------------------------------------------------------------------------

    def open_stream(self, number: str) -> None:
        """Prepare for incoming weights."""
        self._streams.open(number, "the trainer's rank 0")

    @travels
    def bucket(self, number: str, what: Any) -> None:
        """Receive a bucket of weights."""
        self._streams.put(number, what)

    @travels
    def update_weights(self, number: str, transport: str, version: int) -> Any:
        """Pass the incoming pairs to the engine, by its transport."""
        try:
            return self.stage.update_weights(transport, self._streams.take(number), version)
        finally:
            self._streams.close(number)

    @travels
    def differing_weights(self, number: str) -> list[str] | None:
        """Return the names of differing weights, if the engine can compare weights; None if it cannot."""
        try:
            return self.stage.differing_weights(self._streams.take(number))
        finally:
            self._streams.close(number)

    @travels
    def update_weights_from(self, payload: Any, transport: str, version: int) -> Any:
        """Pass another payload to the engine, such as a directory."""
        return self.stage.update_weights(transport, payload, version)

    @travels
    def weight_transports(self) -> tuple[str, ...]:
        """Weight transports that the engine supports."""
        return self.stage.weight_transports

    def compares_weights(self) -> bool:
        """True if the engine can compare weights."""
        return hasattr(self.stage.parts.engine, "differing_weights")

    @travels
    def weight_checksums(self) -> dict[str, str]:
        """Return the checksums of the served weights."""
        return self.stage.weight_checksums()

    @travels
    def call_engine(self, method: str, *args: Any) -> Any:
        """Await a method of the engine in the stage's event loop."""
        return self._loop.run(getattr(self.stage.parts.engine, method)(*args))
