"""The simulated training side: what takes a batch, what hands out weights, and the faults before the journal.

Without `--async` each takes its time by setting the clock on, since nothing else happens meanwhile; with it the same
classes are wrapped in coroutines that sleep. Everything is simulated here but the journal, which is the real one behind
both.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING

from slime_core.errors import TrainError, WeightSyncError
from slime_core.sample import TrainBatch

if TYPE_CHECKING:
    from tests.simulation.world import World

DEADLINE = 600.0
"""Seconds after which a call that hangs is given up by whoever makes it."""


class SimulatedLearner:
    """Takes virtual time for a rollout, and remembers what it was trained on."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.last: TrainBatch | None = None
        self.unpushed = False
        """Trained since the last push."""

    def train(self, rollout_id: int, batch: TrainBatch) -> dict[str, float]:
        """All steps at once. Raises TrainError when the fault says so."""
        fault = self._world.ask("train")
        self._world.clock.now += self.seconds(fault)
        return self.finish(rollout_id, batch, fault)

    def seconds(self, fault: str | None) -> float:
        """It will take."""
        world = self._world
        usual = world.settings.train_seconds * (0.5 + world.rng.random())
        return DEADLINE if fault == "hang" else usual * (50 if fault == "slow" else 1)

    def finish(self, rollout_id: int, batch: TrainBatch, fault: str | None) -> dict[str, float]:
        """The time is over."""
        if fault in ("crash", "hang"):
            raise TrainError(f"the simulated trainer: {fault}")
        self.last, self.unpushed = batch, True
        self._world.history.trained(batch, rollout_id)
        return {"train/loss": 0.0}

    def save(self, directory: Path, rollout_id: int) -> None:
        """Write what it was trained on."""
        (directory / "learner.json").write_text(json.dumps(self._world.history.committing(rollout_id)))

    def load(self, commit: Path) -> None:
        """The history has compared it already."""


class SimulatedWeights:
    """Counts versions and hands them to the stage, as `WeightSync` does."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.version = 0

    def push(self) -> dict[str, float]:
        """Serve the next version. Raises WeightSyncError when the fault says so."""
        fault = self._world.ask("push")
        self._world.clock.now += self.seconds(fault)
        return self.finish(fault)

    @staticmethod
    def seconds(fault: str | None) -> float:
        """Until the engine has them."""
        return {"hang": DEADLINE, "slow": 100.0}.get(fault or "", 0.05)

    def finish(self, fault: str | None) -> dict[str, float]:
        """The engine has them, or has not."""
        world, served = self._world, self._world.engine.weight_version
        if fault in ("crash", "hang"):
            raise WeightSyncError(f"the simulated engine: {fault}")
        for _ in range(2 if fault == "duplicate" else 1):
            world.stage.update_weights("tensor", (), self.version + 1)
        if fault == "late":
            raise WeightSyncError("the simulated engine answered too late")
        self.version += 1
        world.learner.unpushed = False
        world.history.pushed(self.version, served)
        return {"perf/update_weights_time": 0.05}


class SimulatedJournal:
    """The real journal, with faults before it."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.log, self.step_end = world.journal.log, world.journal.step_end

    def save(self, rollout_id: int) -> None:
        """Commit, perhaps late, perhaps twice. Raises CheckpointError as the journal does, TrainError for a fault."""
        fault = self._world.ask("save")
        self._world.clock.now += self.seconds(fault)
        self.finish(rollout_id, fault)

    @staticmethod
    def seconds(fault: str | None) -> float:
        """Until it begins."""
        return 100.0 if fault == "slow" else 0.1

    def finish(self, rollout_id: int, fault: str | None) -> None:
        """The commit itself."""
        world = self._world
        if fault == "crash":
            raise TrainError("the simulated trainer could not save")
        for _ in range(2 if fault == "duplicate" else 1):
            world.journal.save(rollout_id)
            assert world.journal.checkpoint is not None
            world.history.check_commit(world.journal.checkpoint)


class AsyncLearner:
    """`SimulatedLearner` while other things go on."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def train(self, rollout_id: int, batch: TrainBatch) -> dict[str, float]:
        """See there."""
        fault = self._world.ask("train")
        await asyncio.sleep(self._world.learner.seconds(fault))
        return self._world.learner.finish(rollout_id, batch, fault)


class AsyncWeights:
    """`SimulatedWeights` while other things go on."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def push(self) -> dict[str, float]:
        """See there."""
        fault = self._world.ask("push")
        await asyncio.sleep(self._world.weights.seconds(fault))
        return await self._world.threads.call(lambda: self._world.weights.finish(fault))


class AsyncJournal:
    """`SimulatedJournal` while other things go on."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._journal = SimulatedJournal(world)

    async def log(self, step: int, metrics: dict[str, float]) -> None:
        """At once."""
        self._journal.log(step, metrics)

    async def step_end(self, rollout_id: int, metrics: dict[str, float]) -> None:
        """At once."""
        self._journal.step_end(rollout_id, metrics)

    async def save(self, rollout_id: int) -> None:
        """See there."""
        fault = self._world.ask("save")
        await asyncio.sleep(self._journal.seconds(fault))
        await self._world.threads.call(lambda: self._journal.finish(rollout_id, fault))
