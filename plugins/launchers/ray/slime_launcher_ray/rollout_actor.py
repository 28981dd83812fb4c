"""The rollout stage in an actor: draws, generates, scores, filters, batches; takes weights and passes them on.

A threaded actor. Its concurrency groups are its callers' lanes: "work" the loop's calls, "turns" and "evaluation" those
that the asynchronous loop makes beside them, "weights" and "buckets" those of the trainer's rank 0, "control" signs of
life and interrupts. All of them meet in the stage's one event loop (`rollout.loop_thread`). A batch is not returned but
left in the object store, from where the trainer's actors take it; the driver only hands the reference on.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_core.errors import RolloutError, RolloutInterrupted
from slime_core.types import Group, TrainBatch
from slime_launcher_ray.receiver import Streams
from slime_launcher_ray.shell import Shell, travels
from slime_launcher_ray.wait import Member

if TYPE_CHECKING:
    from slime_core.rollout.loop_thread import LoopThread
    from slime_core.rollout.stage import RolloutStage
    from slime_launcher_ray.engine_restart import EngineRestart


class _Samples:
    """In the place of the hooks: keeps the samples of a rollout for those of the driver."""

    def __init__(self) -> None:
        self._kept: dict[int, list[Group]] = {}

    def slime_rollout_end(self, *, rollout_id: int, groups: list[Group], metrics: dict[str, float]) -> None:
        """The stage's call."""
        self._kept[rollout_id] = groups

    def take(self, rollout_id: int) -> list[Group] | None:
        """If they were kept; forgets those before. A rollout that a commit held ready is handed out again."""
        self._kept = {kept: groups for kept, groups in self._kept.items() if kept >= rollout_id}
        return self._kept.get(rollout_id)


class RolloutActor(Shell):
    """The rollout stage of the run's settings."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._stage: RolloutStage | None = None
        self._loop: LoopThread
        self._rollout: Any
        """What generates: the stage, or with `--async` what stands over it, driven by `_ahead_loop`."""
        self._ahead_loop: LoopThread
        self._samples = _Samples()
        self._restarter: EngineRestart | None = None
        """With `--use-fault-tolerance`, of an engine in an actor."""
        self._streams = Streams(self.order.settings.args.distributed_timeout_minutes * 60.0)

    @property
    def stage(self) -> RolloutStage:
        """The stage, once it is built."""
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
        """Construct the stage; rollouts of the run where the data decides them, else None.

        Args:
            engine: The actor that does the engine's work; None: it works here, or is elsewhere.
            tell_groups: The driver has hooks that want the samples of a rollout.
            engine_facts: What the engine's actor told when it was opened.
            several_nodes: The run's actors are on more than one.
        """
        from slime_core.launch.drive import rollouts_of
        from slime_core.rollout.ahead import Ahead
        from slime_core.rollout.loop_thread import LoopThread
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
        self._stage = run.rollout_stage(runner=self._loop)
        self._stage.parts.hooks = self._samples if tell_groups else None  # those of the run are the driver's
        self._rollout = self._stage
        if run.args.async_training:
            self._ahead_loop = LoopThread("slime-async-rollout")
            self._rollout = Ahead(run.args, self._stage)
        if run.args.num_rollout is None:
            run.args.num_rollout = rollouts_of(run.args, self._stage.parts.data_source)
            return int(run.args.num_rollout)
        return None

    def _done(self, work: Any) -> Any:
        """What a verb of the loop's comes to: what it has done already, or is to be awaited."""
        return self._ahead_loop.run(work) if inspect.iscoroutine(work) else work

    # -- the loop's calls ------------------------------------------------------------------------------------

    @travels
    def start(self) -> None:
        """Bring the engine up."""
        self._done(self._rollout.start())

    @travels
    def generate(self, rollout_id: int) -> tuple[TrainBatch | None, dict[str, Any], list[Group] | None]:
        """One rollout: the batch, what the driver is told, and the samples if it wants them."""
        try:
            result = self._done(self._rollout.generate(rollout_id))
        except RolloutInterrupted as interrupted:
            return None, {"interrupted": interrupted.drew}, None
        batch: TrainBatch = result.batch
        told = {"metrics": result.metrics, "size": (len(batch), sum(map(len, batch.tokens)))}
        return batch, told, self._samples.take(rollout_id)

    @travels
    def evaluate(self, rollout_id: int) -> dict[str, float] | None:
        """`eval/...` metrics; None: interrupted."""
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
        """Have the engine give up its memory."""
        self.stage.release_memory()

    @travels
    def resume_memory(self, tags: tuple[str, ...]) -> None:
        """Have it take a part of that again."""
        self.stage.resume_memory(tags)

    @travels
    def save(self, directory: Path, rollout_id: int) -> None:
        """What a commit holds of the generation side."""
        self.stage.save(directory, rollout_id)

    @travels
    def load(self, directory: Path, rollout_id: int) -> str:
        """Inverse of `save`; a few words on what was restored."""
        return self.stage.load(directory, rollout_id)

    @travels
    def abandon(self) -> None:
        """The run goes back to a commit, since a trainer died: end all that runs, and keep the engine. `load` follows.

        Called in the control lane, beside what it ends.
        """
        from slime_core.rollout.ahead import Ahead

        self._streams.give_up()
        self._done(self._rollout.abandon())
        if self._rollout is not self._stage:
            self._rollout = Ahead(self.prepared.args, self.stage)

    def engine_facts(self) -> Mapping[str, Any] | None:
        """What the engine's actor told when it was opened last; None: nobody brings it back."""
        return None if self._restarter is None else self._restarter.facts

    def interrupt(self) -> None:
        """End the rollout in progress; everything drawn is given back."""
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
        """Weights are about to come."""
        self._streams.open(number, "the trainer's rank 0")

    @travels
    def bucket(self, number: str, what: Any) -> None:
        """Some of them."""
        self._streams.put(number, what)

    @travels
    def update_weights(self, number: str, transport: str, version: int) -> Any:
        """Hand the pairs that come to the engine, by its transport."""
        try:
            return self.stage.update_weights(transport, self._streams.take(number), version)
        finally:
            self._streams.close(number)

    @travels
    def differing_weights(self, number: str) -> list[str] | None:
        """What an engine that compares weights finds."""
        try:
            return self.stage.differing_weights(self._streams.take(number))
        finally:
            self._streams.close(number)

    @travels
    def update_weights_from(self, payload: Any, transport: str, version: int) -> Any:
        """Hand anything else over, such as a directory."""
        return self.stage.update_weights(transport, payload, version)

    @travels
    def weight_transports(self) -> tuple[str, ...]:
        """How the engine takes weights."""
        return self.stage.weight_transports

    def compares_weights(self) -> bool:
        """Whether the engine tells differing weights itself."""
        return hasattr(self.stage.parts.engine, "differing_weights")

    @travels
    def weight_checksums(self) -> dict[str, str]:
        """Of what is served."""
        return self.stage.weight_checksums()

    @travels
    def call_engine(self, method: str, *args: Any) -> Any:
        """Await a method of the engine in the stage's event loop."""
        return self._loop.run(getattr(self.stage.parts.engine, method)(*args))
