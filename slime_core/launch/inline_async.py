"""The inline launcher's part of `--async`: `loop_async` in this process, its stages in threads.

::

    main thread      loop_async.train (a coroutine)
    trainer thread   Learner.train, WeightSync.push, Journal      one call at a time (`trainer_thread`)
    stage threads    RolloutStage.generate_groups, evaluate       wait for the loop thread
    loop thread      engine, generate functions, rewards          takes turns (`rollout.loop_thread`)

With several trainer processes the others do as they are told: rank 0's trainer thread broadcasts a word before each
collective call, and a sign of life while it waits for a batch::

    rank 0   {"do": "train", batch}  Learner.train | {"do": "push"}  WeightSync       | ... | {"do": "end"}
    others   Follower                Learner.train |                 FollowingWeights | ... |

What a reader would get wrong: the others know nothing of rollouts, evaluations and intervals, so nothing that only
rank 0 decides, such as an early end, needs to be agreed on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import orjson

from slime_core import loop_async
from slime_core.errors import RolloutError
from slime_core.launch.drain import Drain
from slime_core.launch.process import num_processes
from slime_core.launch.ranks import is_rank
from slime_core.launch.trainer_thread import TrainerThread
from slime_core.launch.trainers import Trainers
from slime_core.observability.timeline import timed_stages
from slime_core.protocols import Args, Trainer
from slime_core.routed_experts import json_default
from slime_core.types import TrainBatch

if TYPE_CHECKING:
    from slime_core.launch.drive import RunParts
    from slime_core.launch.journal import Journal

_AT_WORK = {"do": "wait"}
_WORDS_PER_DEADLINE = 4


class TrainingSide:
    """Learner, weights and journal of `loop_async`, in the trainer thread of rank 0.

    Args:
        parts: Whose learner and weights these are; it is told what a commit has to remember.
        journal: Of the run.
        trainer: Has the connection to the other processes; None when there are none.
        deadline_minutes: Of their wait for a word.
    """

    def __init__(self, parts: RunParts, journal: Journal, trainer: Trainer | None, deadline_minutes: float) -> None:
        self._parts = parts
        self._journal = journal
        self._trainer = trainer
        idle = None if trainer is None else lambda: self._tell(_AT_WORK)
        self._thread = TrainerThread(idle, deadline_minutes * 60 / _WORDS_PER_DEADLINE)

    async def train(self, rollout_id: int, batch: TrainBatch) -> dict[str, float]:
        """All optimizer steps of one rollout."""

        def train() -> dict[str, float]:
            self._tell({"do": "train", "rollout_id": rollout_id, "batch": batch})
            metrics: dict[str, float] = self._parts.learner.train(rollout_id, batch)
            self._parts.unpushed = True
            return metrics

        return await self._thread.call(f"training on rollout {rollout_id}", train)

    async def push(self) -> dict[str, float]:
        """Make the engines serve the newest weights."""

        def push() -> dict[str, float]:
            self._tell({"do": "push"})
            metrics: dict[str, float] = self._parts.weights.push()
            self._parts.unpushed = False
            return metrics

        return await self._thread.call("the weight update", push)

    async def log(self, step: int, metrics: dict[str, float]) -> None:
        """Record metrics under `step` finished rollouts."""
        await self._thread.call("the journal", lambda: self._journal.log(step, metrics))

    async def step_end(self, rollout_id: int, metrics: dict[str, float]) -> None:
        """A rollout has been trained on."""
        await self._thread.call("the journal", lambda: self._journal.step_end(rollout_id, metrics))

    async def save(self, rollout_id: int) -> None:
        """Commit a checkpoint."""

        def save() -> None:
            self._tell({"do": "save"})
            self._journal.save(rollout_id)

        await self._thread.call(f"the commit of rollout {rollout_id}", save)

    async def end(self, error: Exception | None) -> None:
        """Tell the other processes that it is over, and how; not where they may be in the middle of a call."""
        if self._trainer is None or self._thread.failed:
            return
        word = {"do": "end"} if error is None else {"do": "end", "error": f"{type(error).__name__}: {error}"}
        await self._thread.call("the other training processes", lambda: self._tell(word))

    def close(self) -> None:
        """End the thread."""
        self._thread.close()

    def _tell(self, word: Mapping[str, Any]) -> None:
        if self._trainer is not None:
            self._trainer.broadcast(orjson.dumps(word, default=_json))


def _json(value: Any) -> Any:
    return asdict(value) if isinstance(value, TrainBatch) else json_default(value)


def run_loop_async(args: Args, parts: RunParts, journal: Journal, start: int) -> int:
    """Run the asynchronous loop to its end, an early one included; returns how many rollouts are done."""
    side = TrainingSide(
        parts, journal, parts.trainers.actor if num_processes() > 1 else None, args.distributed_timeout_minutes
    )
    try:
        with asyncio.Runner() as runner:
            return runner.run(_drive(args, parts, side, start))
    finally:
        side.close()


async def _drive(args: Args, parts: RunParts, side: TrainingSide, start: int) -> int:
    stays = False
    try:
        await parts.rollout.start()
        with Drain(args.drain_timeout, quiet=is_rank()) as drain:
            drain.on_ask(parts.stage.interrupt)
            stages = loop_async.AsyncStages(parts.rollout, side, side, side, lambda: drain.asked, parts.unfinished)
            try:
                done = await loop_async.train(args, timed_stages(stages, args, start), start)
            except parts.survives as error:
                drain.check_goes_on(error)
                stays = True
                raise
    except Exception as error:
        if not stays:
            await side.end(error)
        raise
    finally:
        if not stays:
            await parts.rollout.stop()
    await side.end(None)
    return done


class Follower:
    """Ranks 1..n-1: does what rank 0 says, and records nothing.

    Args:
        trainers: Of this process.
        learner: On these trainers.
        weights: `weights.collective.FollowingWeights`.
        journal: `data_parallel.FollowingJournal`.
    """

    def __init__(self, trainers: Trainers, learner: Any, weights: Any, journal: Any) -> None:
        self._trainers = trainers
        self._learner = learner
        self._weights = weights
        self._journal = journal

    def run(self) -> None:
        """Until rank 0 says that it is over. Raises RolloutError when it failed."""
        while True:
            word = orjson.loads(self._trainers.broadcast(None))
            if word["do"] == "train":
                self._learner.train(word["rollout_id"], TrainBatch(**word["batch"]))
            elif word["do"] == "push":
                self._weights.push()
            elif word["do"] == "save":
                self._journal.save(-1)
            elif word["do"] == "end":
                if "error" in word:
                    raise RolloutError(f"rank 0 failed: {word['error']}")
                return
