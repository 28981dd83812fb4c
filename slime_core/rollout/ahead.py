"""`Ahead`: what generates beside the training (`--async`), over the rollout stage of runs without it.

The stage's event loop turns in a thread of its own (`rollout.loop_thread`), so a weight update or an evaluation need
not wait for the end of a rollout. With `--async-mode one-step` the next rollout is generated while the trainer trains
on the last one. Each is one call, as in a run without `--async`, so every rollout function will do. With
`--update-weights-interval 1`, and v the weight version that generates::

    generate(r)      before_push        generate(r+1)
    |                |                  |
    |-- generate r+1 (v) --|            |-- generate r+2 (v+1) ...
    |-- train r ----------|wait| push |-- train r+1: one version behind
                                 v+1

No rollout is of two weight versions, and every rollout but the first after a push is trained on by the next version,
which `rollout/staleness/*` shows. A rollout that is complete and waits for training is part of the commit (owner
"ahead" of `open_groups`), so a resumed run trains on it and draws no prompt twice. With `--async-mode full` the stage
takes rollouts out of a generation that never stops (`rollout.producer`): nothing is to be begun or waited for here.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slime_core.errors import RolloutError, RolloutInterrupted
from slime_core.protocols import Args
from slime_core.rollout.open_groups import OpenGroup
from slime_core.rollout.parts import RolloutResult
from slime_core.rollout.staleness import Verdict, judge, mask_old_tokens, retries, staleness_metrics, version_span
from slime_core.types import Group
from slime_core.waits import waiting

if TYPE_CHECKING:
    from slime_core.rollout.stage import RolloutStage

logger = logging.getLogger(__name__)
OWNER = "ahead"


@dataclass
class _Generated:
    """One complete rollout."""

    rollout_id: int
    groups: list[Group]
    metrics: dict[str, float]
    version: int
    """Of the weights that generated it."""
    seconds: float
    """That took; 0 where an earlier process did."""


class Ahead:
    """A rollout of the loop over any stage: at most one rollout is generated here or waits."""

    def __init__(self, args: Args, stage: RolloutStage) -> None:
        """`stage` has a `LoopThread` as its runner and has not been started."""
        self.args = args
        self._one_step = args.async_mode == "one-step"
        self._stage, self._loop = stage, stage.loop_thread()
        self._flight: asyncio.Task[_Generated] | None = None
        self._since = 0.0
        """When the last flight began."""
        self._waiting: _Generated | None = None
        """Complete, not taken."""
        stage.never_stops = not self._one_step
        if self._one_step:
            stage.open_groups.register(OWNER, self)

    async def start(self) -> None:
        """Bring the engine up; generation begins with the first `generate`. Raises CheckpointError as the stage."""
        if not self._one_step and self.args.deterministic_mode:
            logger.info("--async-mode full: the engine is not held for reproducible steps, as it is without --async")
        await self._loop.in_thread(self._stage.start)

    async def generate(self, rollout_id: int) -> RolloutResult:
        """The batch of a rollout; the next one begins, or generation goes on.

        Raises:
            RolloutError: The rollout failed, or has groups over `--max-staleness` that cannot be replaced.
            RolloutInterrupted: The run is to end.
        """
        if not self._one_step:
            return await self._loop.in_thread(self._stage.generate, rollout_id)
        if self._waiting is None and self._flight is None:
            self._begin(rollout_id)
        await self._landed()
        if self._flight is not None:
            self._flight.result()  # raises RolloutInterrupted
        generated, self._waiting = self._waiting, None
        assert generated is not None
        if generated.rollout_id != rollout_id:
            raise RolloutError(f"rollout {generated.rollout_id} is waiting for training, not {rollout_id}")
        metrics = generated.metrics
        if generated.seconds:
            metrics["perf/rollout_idle_fraction"] = 1.0 - generated.seconds / (time.perf_counter() - self._since)
        version = self._stage.weight_version
        metrics |= self._age(generated, version)
        if rollout_id + 1 < self.args.num_rollout:
            self._begin(rollout_id + 1)
        batch = await self._loop.in_thread(self._stage.make_batch, rollout_id, generated.groups, version)
        return RolloutResult(batch, metrics)

    async def before_push(self) -> None:
        """Wait for the rollout that is being generated."""
        await self._landed()

    async def before_save(self) -> None:
        """Wait for the rollout that is being generated."""
        await self._landed()

    async def evaluate(self, rollout_id: int) -> dict[str, float]:
        """`eval/...` metrics."""
        return await self._loop.in_thread(self._stage.evaluate, rollout_id)

    async def abandon(self) -> None:
        """End what runs and leave the engine as it is, for the one that comes after this: the run goes back."""
        flight, self._flight, self._waiting = self._flight, None, None
        if flight is not None:
            flight.cancel()
        await self._loop.in_thread(self._stage.abandon)
        if flight is not None:
            with waiting(flight.get_name(), deadline=None, then="it has been cancelled, and the stage has ended it"):
                await asyncio.wait({flight})

    async def stop(self) -> None:
        """Interrupt what runs and free the engine; safe to call twice."""
        flight, self._flight = self._flight, None
        if flight is not None:
            flight.cancel()
        try:
            await self._loop.in_thread(self._stage.stop)
        finally:
            if flight is not None:
                await asyncio.wait({flight})

    # -- the rollout in flight -----------------------------------------------------------------------

    def _begin(self, rollout_id: int) -> None:
        self._since = time.perf_counter()
        self._flight = asyncio.create_task(self._generate(rollout_id), name=f"rollout {rollout_id}")

    async def _generate(self, rollout_id: int) -> _Generated:
        version, started = self._stage.weight_version, time.perf_counter()
        groups, metrics = await self._loop.in_thread(self._stage.generate_groups, rollout_id)
        return _Generated(rollout_id, groups, metrics, version, time.perf_counter() - started)

    async def _landed(self) -> None:
        """Wait for the rollout in flight; one that was interrupted stays in flight for `generate` to tell."""
        flight = self._flight
        if flight is None:
            return
        with waiting(flight.get_name(), deadline=None, then="its samples have deadlines of their own"):
            await asyncio.wait({flight})
        if not flight.cancelled() and isinstance(flight.exception(), RolloutInterrupted):
            return
        self._flight = None
        self._waiting = flight.result()

    # -- staleness -----------------------------------------------------------------------------------

    def _age(self, generated: _Generated, version: int) -> dict[str, float]:
        """Apply `--max-staleness` to what `version` is about to train on; the metrics. Raises RolloutError."""
        unknown, groups, masked = generated.version, generated.groups, 0
        for group in groups:
            span = version_span(group, unknown)
            if span is None or judge(self.args, span, retries(group), version) is Verdict.FRESH:
                continue
            if self.args.staleness_policy != "mask":
                name = f"rollout {generated.rollout_id}: group {group[0].group_index}"
                raise RolloutError(
                    f"{name} is {version - span[0]} weight versions old"
                    f" (--max-staleness {self.args.max_staleness}), and a rollout that was generated ahead has no other"
                    " in its place; choose --staleness-policy mask, or --async-mode full, which replaces such groups"
                )
            assert self.args.max_staleness is not None, "without it every group is fresh"
            masked += mask_old_tokens(group, version, self.args.max_staleness, unknown)
        metrics = staleness_metrics(((group, unknown) for group in groups), version)
        if self.args.max_staleness is not None:
            metrics["rollout/staleness/masked_tokens"] = float(masked)
        if "rollout/staleness" in generated.metrics:  # of its tokens when it was complete; all have aged alike
            metrics["rollout/staleness"] = generated.metrics["rollout/staleness"] + version - unknown
        return metrics

    # -- commits -------------------------------------------------------------------------------------

    def open_groups(self) -> Iterable[OpenGroup]:
        """The groups of the rollout that waits for training."""
        ahead = self._waiting
        if ahead is None:
            return []
        details = {"metrics": ahead.metrics, "version": ahead.version}
        return [OpenGroup(group, ahead.rollout_id, details if i == 0 else {}) for i, group in enumerate(ahead.groups)]

    def restore_open_groups(self, groups: list[OpenGroup]) -> None:
        """Inverse of `open_groups`."""
        first = groups[0]
        assert first.rollout_id is not None
        rollout = [group.samples for group in groups]
        metrics = {name: float(value) for name, value in first.details["metrics"].items()}
        self._waiting = _Generated(first.rollout_id, rollout, metrics, int(first.details["version"]), 0.0)
