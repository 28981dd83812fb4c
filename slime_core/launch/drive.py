"""Drive a run from the start of its record to its summary, with any launcher: resume, loop, hooks, end.

Each launcher builds the parts of its run and calls `drive` in the process that records the run. It passes the real
parts (`inline`), or stand-ins for parts in other processes. If the launcher names errors that the run survives, `drive`
may run the loop several times; only the last end counts as the run's end. In an asynchronous run the learner, the
weights and the journal work in a thread of their own::

    main thread      loop.train (a coroutine)
    trainer thread   Learner.train, WeightSync.push, Journal      one call at a time
    stage threads    RolloutStage.generate_groups, evaluate       wait for the loop thread
    loop thread      engine, generate functions, rewards          takes turns (`rollout.event_loop`)
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from slime_core import loop
from slime_core.checkpoint.run_dir import CONFIG, check_there, cut_after, run_dir_of, write_text
from slime_core.checkpoint.store import rollout_of
from slime_core.data.dumps import check_saved
from slime_core.distributions import offered
from slime_core.errors import ConfigError, rollout_name
from slime_core.launch import drain
from slime_core.launch.journal import Journal
from slime_core.launch.lock import open_run_dir
from slime_core.launch.prepare import Prepared
from slime_core.launch.ranks import is_rank
from slime_core.launch.resume import first_rollout, goes_on, how_to_go_on, restore, unfinished_evaluations
from slime_core.launch.roles import Trainers, current_device, use_device
from slime_core.models.hf_io import copy_assets
from slime_core.protocols import Args
from slime_core.sample import TrainBatch
from slime_core.waits import waiting
from slime_core.weights.sync import WeightReceiver, WeightSync

if TYPE_CHECKING:
    from slime_core.learning.learner import Learner

logger = logging.getLogger(__name__)

_OFFLOAD_TIME, _ONLOAD_TIME = "perf/offload_time", "perf/onload_time"
CLOSE_DEADLINE = 30.0
"""Seconds to wait for the running call when the trainer thread is closed."""


@dataclass
class RunParts:
    """The parts of a run in its leading process: real objects, or stand-ins for objects in other processes."""

    trainers: Any
    """Has `save` and `load` of all ranks' part of a checkpoint, and with `--offload-train` `offload` and `onload`."""
    stage: Any
    """Has `save`, `load`, `interrupt` and `stop` (`RolloutStage`)."""
    rollout: Any
    """The rollout part of the loop's stages (`loop.Stages`)."""
    learner: Any
    weights: Any
    """Has `version` and the methods that the loop needs (`WeightSync`)."""
    together: Callable[..., AbstractContextManager[None]] = lambda do, **_: nullcontext()
    """`launch.roles.Leader.together` if other training processes run the same calls."""
    unpushed: bool = False
    """True if no engine serves the newest trained weights: with `--update-weights-interval`, or during a step."""
    unfinished: list[int] = field(default_factory=list)
    """See `loop.Stages`."""
    survives: tuple[type[Exception], ...] = ()
    """Loop errors after which the generation side stays up and `recover` is called."""
    recover: Callable[[Exception, Journal], int] | None = None
    """Restores the parts to the last commit and returns the next rollout id. Raises if that is impossible."""


def drive(run: Prepared, parts: RunParts, commit: Path | None, started: float) -> dict[str, object]:
    """Drive the run from the start of its record to its summary, for every launcher: resume, loop, hooks, stop."""
    args, run_dir, stage, weights = run.args, run_dir_of(run.args), parts.stage, parts.weights
    journal = Journal(
        args,
        run_dir,
        run.hooks,
        [lambda directory, _: parts.trainers.save(directory), stage.save],
        lambda: {
            "weight_version": weights.version + parts.unpushed,
            "unfinished_evaluations": parts.unfinished,
            "settings": run.settings.to_dict(),
        },
        run.plugins,
        started,
    )
    start = args.start_rollout_id = first_rollout(args, commit)
    with run_hooks(run, run_dir):
        if commit is not None:
            restore(
                args, commit, run.settings.to_dict(),
                trainer=parts.trainers, stage=stage, weights=weights, journal=journal,
            )  # fmt: skip
            if not args.finetune:
                parts.unfinished += unfinished_evaluations(commit)
        cut_after(run_dir, start, parts.unfinished)
        try:
            done = _to_the_end(args, parts, journal, start)
        except BaseException as error:
            if isinstance(error, Exception):
                check_there(run_dir, error)
            commits = journal.store.commits()
            kept = rollout_of(commits[-1]) + 1 if commits else 0
            error.add_note(how_to_go_on(args, kept, committed=bool(commits)))
            raise
        finally:
            stage.stop()
        early = done < args.num_rollout or bool(parts.unfinished)
        return journal.finish(run.settings.command, done, str(commit) if commit else None, early=early)


def _to_the_end(args: Args, parts: RunParts, journal: Journal, start: int) -> int:
    """Run the loop, again from the last commit after errors in `parts.survives`; return the number of rollouts done."""
    while True:
        try:
            return _run_loop(args, parts, journal, start)
        except parts.survives as error:
            assert parts.recover is not None
            start = parts.recover(error, journal)
            parts.unpushed = False
            parts.unfinished[:] = unfinished_evaluations(journal.store.commits()[-1])


def _run_loop(args: Args, parts: RunParts, journal: Journal, start: int) -> int:
    """Run the loop to its regular or early end; return the number of rollouts done."""
    if args.offload_train:  # before the engines start, so that they see the memory
        parts.trainers.offload()
    training = Training(args, parts)
    stages = loop.Stages(parts.rollout, training, training, journal, unfinished=parts.unfinished)
    train = [*journal.hooks.slime_loop(parts=parts), loop.train][0]
    if not args.async_training:
        return loop.now(_loop(args, parts, stages, start, train))
    thread = TrainerThread()
    try:
        with asyncio.Runner() as runner:
            return runner.run(_loop(args, parts, thread.stages(stages), start, train))
    finally:
        thread.close()


async def _loop(
    args: Args, parts: RunParts, stages: loop.Stages, start: int, train: Callable[..., Awaitable[int]]
) -> int:
    """Start the engines, run `train` and stop the engines; after an error that the run survives, keep them up."""
    survived: BaseException | None = None
    try:
        await loop.answer(stages.rollout.start())
        with drain.Drain(args.drain_timeout, quiet=is_rank()) as draining:
            draining.on_ask(parts.stage.interrupt)
            stages = replace(stages, stop=draining.stops)
            if (timeline := offered("slime.metrics", "timeline")) is not None:
                stages = timeline.timed_stages(stages, args, start)
            try:
                return int(await train(args, stages, start))
            except parts.survives as error:
                draining.check_goes_on(error)
                survived = error
                raise
    finally:
        if survived is None:
            await loop.answer(stages.rollout.stop())


class Training:
    """The loop's learner and weights: runs calls on all training processes and keeps `unpushed` up to date.

    With `--offload` trainer and engines share devices, so each frees its memory while the other works::

        generate -> [engines release, trainer onload] -> train -> [trainer offload, engines resume weights] -> push
                 -> [engines resume KV cache] -> evaluate, save, generate

    The trainer saves its state from host memory or device memory, wherever the state is. Before the first push nothing
    has been released, and the engines hold the weights that they loaded.
    """

    def __init__(self, args: Args, parts: RunParts) -> None:
        self._parts = parts
        self._trainers = parts.trainers if args.offload_train else None
        self._engines = parts.rollout if args.offload_rollout else None
        shared = args.offload_train or args.offload_rollout
        self._seconds = {_OFFLOAD_TIME: 0.0, _ONLOAD_TIME: 0.0} if shared else {}

    def train(self, rollout_id: int, batch: TrainBatch) -> dict[str, float]:
        """Run all optimizer steps of one rollout, while engines that share its devices are idle."""
        if self._engines is not None:
            with self._timed(_OFFLOAD_TIME):
                self._engines.release_memory()
        if self._trainers is not None:
            with self._timed(_ONLOAD_TIME):
                self._trainers.onload()
        with self._parts.together("train", rollout_id=rollout_id, batch=batch):
            metrics: dict[str, float] = self._parts.learner.train(rollout_id, batch)
        self._parts.unpushed = True
        if self._trainers is not None:  # from now on it only sends its weights and saves
            with self._timed(_OFFLOAD_TIME):
                self._trainers.offload()
        return metrics

    def push(self) -> dict[str, float]:
        """Make the engines serve the newest weights; the metrics have the times of offloading since the last push."""
        self._resume("weights")
        with self._parts.together("push"):
            metrics: dict[str, float] = self._parts.weights.push()
        self._parts.unpushed = False
        self._resume("kv_cache")
        spent, self._seconds = self._seconds, dict.fromkeys(self._seconds, 0.0)
        return {**metrics, **spent}

    def _resume(self, tag: str) -> None:
        if self._engines is not None:
            with self._timed(_ONLOAD_TIME):
                self._engines.resume_memory((tag,))

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._seconds[name] += time.perf_counter() - started


class TrainerThread:
    """The thread of an asynchronous run that runs calls in the order in which they are queued.

    A call cannot be interrupted. `close` waits for the running call up to a deadline, and then leaves the thread to end
    with the process.
    """

    def __init__(self) -> None:
        self._queue: queue.Queue[tuple[Future[Any], Callable[[], object]] | None] = queue.Queue()
        self._device = current_device()
        self._thread = threading.Thread(target=self._work, name="slime-trainer", daemon=True)
        self._thread.start()

    def stages(self, stages: loop.Stages) -> loop.Stages:
        """Return a copy of the stages whose learner, weights and journal run in this thread, beside the loop."""

        def moved(stage: object, **methods: str) -> Any:
            calls = {name: partial(self._call, text, getattr(stage, name)) for name, text in methods.items()}
            return SimpleNamespace(**calls)

        return replace(
            stages,
            learner=moved(stages.learner, train="training on {}"),
            weights=moved(stages.weights, push="the weight update"),
            journal=moved(stages.journal, log="the journal", step_end="the journal", save="the commit of {}"),
        )

    async def _call(self, text: str, fn: Callable[..., object], *args: Any) -> object:
        """Run `fn(*args)` in the thread and return its result; raise any exception of `fn`. `text` names the wait."""
        future: Future[Any] = Future()
        self._queue.put((future, partial(fn, *args)))
        deadlines = "its own deadline: --train-timeout, --weight-push-timeout, ..."
        with waiting(text.format(*map(rollout_name, args[:1])), deadline=None, then=deadlines):
            return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Wait for the calls up to `CLOSE_DEADLINE` and end the thread; safe to call twice."""
        self._queue.put(None)
        self._thread.join(CLOSE_DEADLINE)
        if self._thread.is_alive():
            logger.warning("the trainer's call did not end within %.0f s; left alone", CLOSE_DEADLINE)

    def _work(self) -> None:
        use_device(self._device)
        while (item := self._queue.get(timeout=None)) is not None:
            future, fn = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = fn()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
            del item, future, fn


def begin_run_dir(run: Prepared, commit: Path | None) -> None:
    """Create the run directory and print the starting points of the run. Raises ConfigError, RolloutError."""
    args = run.args
    if args.load_debug_rollout_data:
        check_saved(args, first_rollout(args, commit))
    open_run_dir(args, resume=goes_on(run.settings, commit))
    for line in run.starting_points:
        print(line, flush=True)
    if args.dump_details:
        copy_assets(args.hf_checkpoint, Path(args.dump_details) / "tokenizer")


def build_weights(
    run: Prepared, trainers: Trainers, receiver: WeightReceiver, on_update: Callable[[int], object]
) -> WeightSync:
    """Build the weight sync of the rank-0 process; it calls `on_update` with each version once engines serve it."""
    return WeightSync(run.args, trainers.actor, receiver, on_update, run.hooks.caller("slime_weights_written"))


def build_learner(run: Prepared, trainers: Trainers) -> Learner:
    """Build the learner of this rank's process."""
    from slime_core.learning.learner import Learner

    estimator = run.parts.build_estimator(run.args)
    loss = run.parts.build_loss(run.args, estimator)
    return Learner(
        *(run.args, trainers.actor, estimator, loss),
        critic=trainers.critic,
        postprocess=run.hooks.caller("slime_train_data"),
        on_trained=run.hooks.caller("slime_rollout_trained"),
    )


def rollouts_of(args: Args, source: object) -> int:
    """Convert `--num-epoch` to a number of rollouts. Raises ConfigError."""
    if not hasattr(source, "__len__"):
        raise ConfigError("--num-epoch needs a data source with a length; set --num-rollout instead")
    assert args.num_epoch is not None, "one of the two lengths is required"
    rollouts = int(args.num_epoch * (len(source) // args.rollout_batch_size))
    if rollouts == 0:
        raise ConfigError(
            f"--num-epoch {args.num_epoch}: the {len(source)} prompts do not fill one rollout of --rollout-batch-size"
            f" {args.rollout_batch_size}; lower it, or set --num-rollout"
        )
    return rollouts


@contextmanager
def run_hooks(run: Prepared, run_dir: Path) -> Iterator[None]:
    """Write `config.yaml`; call `slime_run_start` on entry and `slime_run_end` on every exit."""
    write_text(run_dir / CONFIG, run.settings.to_yaml(directory=os.getcwd()))
    run.hooks.slime_run_start(args=run.args, run_dir=run_dir)
    try:
        yield
    except BaseException as error:
        run.hooks.slime_run_end(error=error)
        raise
    run.hooks.slime_run_end(error=None)
