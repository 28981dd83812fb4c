"""Generation that never stops (`--async-mode full`): an endless pool, out of which the rollout stage takes rollouts.

Weights are pushed while groups are in flight::

    in flight   ...==g3=====v1|v2=====g9====...        one response, tokens of two versions
    take(r)         |rollout_batch_size oldest|
    train, push               |---- r ----|push|

so tokens of one response may be of several weight versions, each of which the sample records, and every estimator's
corrections (TIS, ...) see the log-probs they were sampled with. The built-in rollout function is what this stands in
for: generate functions, rewards, filters, buffers and hooks work as in a run without `--async`; another
`--rollout-function-path` decides itself when its rollout is complete, so it is refused.

One task does all the deciding; `take` waits until enough groups wait that the present
weights may train on, or until none will come: once so many went between two takes that `--dynamic-sampling-budget` x
batch size would not have made a rollout, nothing more is drawn, and when everything in flight has ended without making
one, `--dynamic-sampling-on-exhausted` says what becomes of it. An exception in the task (data source, filter, too many
failures in a row) is raised by the `take` that waits, or comes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from slime_core.data.buffer import is_finished
from slime_core.errors import RolloutError, RolloutInterrupted
from slime_core.protocols import Args
from slime_core.rollout.contracts import first_number
from slime_core.rollout.deadlines import ended
from slime_core.rollout.fate import given_back, restarted
from slime_core.rollout.flights import Bell, Flight
from slime_core.rollout.open_groups import (
    ASIDE,
    IN_FLIGHT,
    WAITING,
    OpenGroup,
    check_group_size,
    finished_to_open,
    flight_to_open,
    open_to_finished,
)
from slime_core.rollout.pool import Pool
from slime_core.rollout.schedule import RolloutContext
from slime_core.types import Group
from slime_core.waits import waiting

OWNER = "continuous"
"""Of the groups that it holds (`rollout.open_groups`)."""


class Taken(NamedTuple):
    """The groups of one rollout."""

    groups: list[Group]
    """By `group_index`."""
    decided: list[Group]
    """Those, and the ones that went since the rollout before, by `group_index`."""
    metrics: dict[str, float]
    started: float
    """`time.perf_counter()` when the rollout before was taken; of the first one when generation began."""


class GroupProducer:
    """Keeps groups in flight in the event loop of whoever calls `take`; all methods belong into that loop."""

    def __init__(self, args: Args, source: Any, context: RolloutContext, version: Callable[[], int]) -> None:
        """`version` answers which weight version is the newest: what is taken now is trained on by it."""
        self.args, self.source, self.context = args, source, context
        self._version = version
        self._news = Bell()
        """Rings when groups have been decided on, or none will be any more."""
        self.pool = Pool(args, source, context, version=version, told=self._news.ring)
        self._task: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None
        self._sees_requests = False
        self._started_at = self._since = 0.0

    # -- the task ------------------------------------------------------------------------------------

    def start(self, rollout_id: int) -> None:
        """Begin to generate for a rollout and those after it; nothing to do when that has happened."""
        pool = self.pool
        if self._task is not None or pool.halted:
            return
        self._begin(rollout_id)
        first = first_number(rollout_id)
        held = [g[0].group_index or 0 for g in [*pool.again, *(f.samples for f in pool.finished.waiting)]]
        pool.numbered = max((index - first + 1 for index in held if index >= first), default=0)
        self._started_at, self._since = asyncio.get_running_loop().time(), time.perf_counter()
        self.context.runner.engine.take_busy_seconds()
        self._task = asyncio.create_task(self._produce(), name="slime-producer")

    def _begin(self, rollout_id: int) -> None:
        self.pool.begin(rollout_id)
        begin = getattr(self.source, "begin_rollout", None)
        if begin is not None:
            begin(rollout_id, self._version())

    def wake(self) -> None:
        """Something has changed that there may be room for: weights came, someone takes."""
        self.pool.bell.ring()

    async def _produce(self) -> None:
        try:
            await self.pool.run()
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._failure = error
            self._news.ring()

    # -- taking --------------------------------------------------------------------------------------

    async def take(self, rollout_id: int) -> Taken:
        """Wait for the groups of a rollout; generation goes on. One `take` at a time, in order of the rollouts.

        Raises:
            RolloutError: No rollout can come about any more, or what the task raised.
            RolloutInterrupted: `context.work.interrupt` was called; generation has ended, everything in flight is given
                back, and what is finished waits.
        """
        pool = self.pool
        assert not pool.taking, "one rollout is taken at a time"
        if self.context.work.interrupted:
            await self.halt(None if self.args.partial_rollout else 0.0)
            raise RolloutInterrupted
        self.start(rollout_id)
        assert rollout_id == pool.rollout_id, f"rollout {pool.rollout_id} is next"
        pool.taking = True
        try:
            complete = await self.context.until_interrupted(self._completed())
        finally:
            pool.taking = False
        if not complete:
            await self.halt(None if self.args.partial_rollout else 0.0)
            raise RolloutInterrupted
        return self._hand_over()

    async def _completed(self) -> None:
        """Return when enough groups wait that the present weights may train on."""
        pool = self.pool
        with waiting(f"the groups of rollout {pool.rollout_id}", deadline=None, then="every group has its own"):
            self.wake()  # there is room for a whole rollout now
            while True:
                if self._failure is not None:
                    raise self._failure
                held = pool.held
                if self._complete():
                    return
                if pool.held != held:  # too old: there is room again (a wake without need would come back as news)
                    self.wake()
                self._news.clear()
                await self._news.wait(None, at_once=True)

    def _complete(self) -> bool:
        """Whether a rollout can be taken. Raises RolloutError when none will come about."""
        pool = self.pool
        pool.finished.cull()
        if len(pool.finished.waiting) >= pool.finished.wanted:
            return True
        if pool.flights or not pool.exhausted:
            return False
        pool.finished.settle()
        return True

    def _hand_over(self) -> Taken:
        """The oldest groups that wait, as the rollout; the next one begins."""
        pool, engine = self.pool, self.context.runner.engine
        now, busy = asyncio.get_running_loop().time(), engine.take_busy_seconds()
        elapsed, self._started_at = now - self._started_at, now
        self._sees_requests |= busy > 0  # not those of generate functions that post to the engine
        groups, metrics = pool.finished.take_oldest()
        metrics["rollout/queue/in_flight_groups"] = float(len(pool.flights))
        if elapsed > 0 and self._sees_requests:
            metrics["perf/engine_idle_fraction"] = max(0.0, 1.0 - busy / elapsed)
        decided = sorted([*groups, *pool.finished.gone], key=lambda g: g[0].group_index or 0)
        pool.finished.gone = []
        self._begin(pool.rollout_id + 1)
        self.wake()
        started, self._since = self._since, time.perf_counter()
        return Taken(groups, decided, metrics, started)

    # -- ending, and commits -------------------------------------------------------------------------

    async def halt(self, patience: float | None = None) -> None:
        """End generation for good: what is in flight is aborted and given back, or waits if it is finished.

        Args:
            patience: Seconds that aborted samples get to come back with their tokens; `--rollout-stop-timeout` if None.
        """
        pool = self.pool
        if pool.halted:
            return
        for flight in await self._land(patience):
            finished, drawn = flight.result(), flight.original
            if finished is None:
                pool.again.append(restarted(drawn))
            elif is_finished(finished.samples):
                pool.decide(finished)
            else:
                pool.again.append(given_back(self.args, drawn, finished.samples))
        pool.give_back(list(pool.again))
        pool.again.clear()

    async def stop(self) -> None:
        """End at once; nothing can be taken any more. Safe to call twice."""
        self._failure = self._failure or RolloutError("generation has been stopped")
        if not self.pool.halted:
            await self._land(0.0)
        self._news.ring()

    async def _land(self, patience: float | None) -> list[Flight]:
        self.pool.halted = True
        if self._task is not None:
            await ended({self._task})
        return await self.pool.land(patience)

    def open_groups(self) -> list[OpenGroup]:
        """Every group it holds, for a commit."""
        pool, partial, scores_groups = self.pool, self.args.partial_rollout, self.context.runner.rewards.scores_groups
        waiting = sorted(pool.finished.waiting, key=lambda f: f.turn)
        return [
            *(finished_to_open(f, WAITING) for f in waiting),
            *(finished_to_open(f, ASIDE) for _, f in pool.finished.aside),
            *(OpenGroup(group, details={"state": IN_FLIGHT, "began": self._version()}) for group in pool.again),
            *(flight_to_open(f, partial=partial, scores_groups=scores_groups) for f in pool.flights),
        ]

    def restore_open_groups(self, groups: list[OpenGroup]) -> None:
        """Inverse of `open_groups`, before `start`. Raises CheckpointError for unfinished groups of another size."""
        assert self._task is None, "generation has begun"
        for group in groups:
            state = group.details["state"]
            if state == IN_FLIGHT:
                self.pool.again.append(check_group_size(group, self.args.n_samples_per_prompt))
            elif state == WAITING:
                self.pool.finished.keep(open_to_finished(group))
            else:
                self.pool.finished.put_aside(open_to_finished(group))
