"""`ContinuousRollout`: generation never stops, rollouts are taken out of it (`--async-mode full`).

`loop.train` calls it; `ahead.build_async_rollout` builds it over a rollout stage whose event loop turns
in a thread of its own. Weights are pushed while groups are in flight::

    in flight   ...==g3=====v1|v2=====g9====...        one response, tokens of two versions
    generate(r)     |rollout_batch_size oldest|
    train, push               |---- r ----|push|

so tokens of one response may be of several weight versions, each of which the sample records, and every estimator's
corrections (TIS, ...) see the log-probs they were sampled with. The built-in rollout function is what this stands in
for: generate functions, rewards, filters, buffers and hooks work as in a run without `--async`; another
`--rollout-function-path` decides itself when its rollout is complete, so it is refused. `--deterministic-mode` does not
hold the engine here. What shares an engine step depends on when the trainer was done.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from slime_core.protocols import Args
from slime_core.rollout.open_groups import OpenGroup
from slime_core.rollout.parts import RolloutResult
from slime_core.rollout.producer import GroupProducer, Taken

if TYPE_CHECKING:
    from slime_core.rollout.stage import RolloutStage

logger = logging.getLogger(__name__)

OWNER = "continuous"


class ContinuousRollout:
    """A rollout of the loop that takes rollouts out of a generation that never stops."""

    def __init__(self, args: Args, stage: RolloutStage) -> None:
        self.args = args
        self._stage, self._loop = stage, stage.loop_thread()
        self._producer: GroupProducer | None = None
        self._restored: list[OpenGroup] = []
        """Until there is a producer to take them."""
        self._since: float | None = None
        """When the last rollout was taken."""
        stage.open_groups.register(OWNER, self)

    async def start(self) -> None:
        """Bring the engine up; generation begins with the first `generate`. Raises CheckpointError (`open_groups`)."""
        if self.args.deterministic_mode:
            logger.info("--async-mode full: the engine is not held for reproducible steps, as it is without --async")
        await self._loop.in_thread(self._stage.start)
        self._producer = self._stage.producer()
        self._producer.restore_open_groups(self._restored)
        self._restored = []

    async def generate(self, rollout_id: int) -> RolloutResult:
        """The oldest groups that may be trained on, as the batch of a rollout; generation goes on.

        Raises:
            RolloutError: No rollout can come about, or generation has failed.
            RolloutInterrupted: The run is to end; generation has ended, what is finished waits, the rest is given back.
        """
        assert self._producer is not None, "start comes first"
        started = time.perf_counter() if self._since is None else self._since
        taken: Taken = await self._loop.wait(self._producer.take(rollout_id))
        version = self._stage.weight_version
        self._since = time.perf_counter()
        in_thread, stage = self._loop.in_thread, self._stage
        metrics = await in_thread(stage.conclude, rollout_id, taken.groups, taken.decided, taken.metrics, started)
        return RolloutResult(await in_thread(stage.make_batch, rollout_id, taken.groups, version), metrics)

    async def before_push(self) -> None:
        """Nothing: weights are updated in flight."""

    async def before_save(self) -> None:
        """Nothing: a commit holds what is in flight (see open_groups)."""

    async def evaluate(self, rollout_id: int) -> dict[str, float]:
        """`eval/...` metrics, on the same engine; training groups go on beside it."""
        return await self._loop.in_thread(self._stage.evaluate, rollout_id)

    async def abandon(self) -> None:
        """End generation and leave the engine as it is, for the one that comes after this: the run goes back."""
        producer, self._producer = self._producer, None
        if producer is not None:
            await self._loop.wait(producer.stop())
        await self._loop.in_thread(self._stage.abandon)

    async def stop(self) -> None:
        """End generation and free the engine; safe to call twice."""
        producer, self._producer = self._producer, None
        try:
            if producer is not None:
                await self._loop.wait(producer.stop())
        finally:
            await self._loop.in_thread(self._stage.stop)

    def open_groups(self) -> Iterable[OpenGroup]:
        """Every group that is neither in the buffer nor trained on, for a commit."""
        return self._restored if self._producer is None else self._producer.open_groups()

    def restore_open_groups(self, groups: list[OpenGroup]) -> None:
        """Inverse of `open_groups`, before `start`."""
        self._restored = groups
