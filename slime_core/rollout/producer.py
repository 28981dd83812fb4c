"""Generation that never stops: groups are started while there is room, and taken for training, oldest first.

`rollout.continuous` puts one into the rollout stage's event loop. One task does all the deciding::

                      +-- interrupted, or too old: as prompts, or with their tokens --+
                      v                                                               |
    data source --draw--> in flight --done--> filter --keep--> waiting --take, by age--> rollout r
                           |                     |drop            |too old, retries spent
                           +---- lost (failed) --+----------------+--> gone, counted with a reason

There is room while fewer than `--async-buffer-groups` groups wait (a whole rollout's, while `take` waits), fewer than
`--sglang-server-concurrency` samples are unfinished, and, with `--max-staleness`, a group begun now would not be too
old when its turn comes. `--dynamic-sampling-budget` counts the groups that went between two takes: once so many are
gone that budget x batch size would not have made a rollout, nothing more is drawn, and when everything in flight has
ended without making one, `--dynamic-sampling-on-exhausted` says what becomes of it. What a reader would get wrong: an
exception in the task (data source, filter, too many failures in a row) is raised by the `take` that waits, or comes.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from slime_core.data.buffer import is_finished
from slime_core.errors import RolloutError, RolloutInterrupted
from slime_core.plugins.boundary import user_code
from slime_core.protocols import Args
from slime_core.rollout import staleness
from slime_core.rollout.contracts import drawn_groups, first_number
from slime_core.rollout.deadlines import Bell, Limits, ended, run_group, some_done
from slime_core.rollout.decisions import Outcome, decide, given_back, mask_older, needs_nothing, prepare_return
from slime_core.rollout.finished_groups import FinishedGroups, Taken
from slime_core.rollout.flights import (
    IN_FLIGHT,
    CountingRunner,
    Finished,
    check_group_size,
    flight_to_open,
)
from slime_core.rollout.generate import train_sampling_params
from slime_core.rollout.open_groups import OpenGroup
from slime_core.rollout.pool import Flight, Flights
from slime_core.rollout.regenerate import prompts_of, restarted
from slime_core.rollout.schedule import RolloutContext
from slime_core.types import Group
from slime_core.waits import waiting


class GroupProducer:
    """Keeps groups in flight in the event loop of whoever calls `take`; all methods belong into that loop."""

    def __init__(self, args: Args, source: Any, context: RolloutContext, version: Callable[[], int]) -> None:
        """`version` answers which weight version is the newest: what is taken now is trained on by it."""
        self.args = args
        self.source = source
        self.context = context
        self.ledger = context.ledger
        self._version = version
        self.rollout_id = 0
        """The rollout that is taken next."""
        self.finished = FinishedGroups(args, source, context)
        self.bell = Bell()
        self.flights = Flights(self.bell)
        self._again: deque[Group] = deque()
        """In flight when the run was interrupted, to be generated first."""
        self._task: asyncio.Task[None] | None = None
        self._news: asyncio.Future[None] | None = None
        self._failure: BaseException | None = None
        self._taking = self._halted = self._sees_requests = False
        self._taken_by: tuple[int, int] = (0, 0)
        """A weight version, and how many groups were taken for training by it."""
        self._started_at = 0.0
        self._numbered = 0
        self._aborts_in_a_row = self._num_drawn = 0

    # -- room ----------------------------------------------------------------------------------------

    @property
    def _held(self) -> int:
        return len(self.finished.waiting) + len(self.flights)

    @property
    def _exhausted(self) -> bool:
        """Whether so many groups went, or came back aborted in a row, that no more are drawn for this rollout."""
        args = self.args
        patience = args.dynamic_sampling_budget * args.rollout_batch_size + 2 * args.sglang_server_concurrency
        return self.finished.spent or self._aborts_in_a_row > patience

    def room(self) -> int:
        """How many groups may be started now."""
        args, held, wanted = self.args, self._held, self.finished.wanted if self._taking else 0
        most_waiting = max(args.async_buffer_groups or args.rollout_batch_size, wanted)
        if self._halted or self._exhausted or len(self.finished.waiting) >= most_waiting:
            return 0
        free = args.sglang_server_concurrency - self.flights.places
        room = math.ceil(free / (args.n_samples_per_prompt + self.context.runner.greedy_baseline))
        if args.num_rollout is not None:
            room = min(room, (args.num_rollout - self.rollout_id) * args.rollout_batch_size - held)
        if args.max_staleness is not None:
            # One begun now is preceded by `taken + held` others that the present weights and their successors train on.
            version, taken = self._taken_by
            taken = taken if version == self._version() else 0
            per_version = args.update_weights_interval * args.rollout_batch_size
            room = min(room, max((args.max_staleness + 1) * per_version - taken - held, wanted - held))
        return int(max(room, 0))

    # -- the task ------------------------------------------------------------------------------------

    def start(self, rollout_id: int) -> None:
        """Begin to generate for a rollout and those after it; nothing to do when that has happened."""
        if self._task is not None or self._halted:
            return
        self._begin(rollout_id)
        first = first_number(rollout_id)
        held = [g[0].group_index or 0 for g in [*self._again, *(f.samples for f in self.finished.waiting)]]
        self._numbered = max((index - first + 1 for index in held if index >= first), default=0)
        self._started_at = asyncio.get_running_loop().time()
        self.context.runner.engine.take_busy_seconds()
        self._task = asyncio.create_task(self._produce(), name="slime-producer")

    def _begin(self, rollout_id: int) -> None:
        self.rollout_id, self._numbered = rollout_id, 0
        begin = getattr(self.source, "begin_rollout", None)
        if begin is not None:
            begin(rollout_id, self._version())

    def wake(self) -> None:
        """Something has changed that there may be room for: a sample ended, weights came, someone takes."""
        self.bell.ring()

    async def _produce(self) -> None:
        try:
            while True:
                self.bell.clear()
                for flight in self.flights.take_ended():
                    self._decide(flight.task.result(), flight.original, flight.began)
                if (room := self.room()) > 0:
                    self._draw(room)
                    self.wake()  # what was drawn finished may leave room for more
                self._tell()
                await self._rest()
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._failure = error
            self._tell()

    async def _rest(self) -> None:
        """Until something has changed. Raises RolloutError when nothing of what is in flight ends any more."""
        if self.flights:
            await some_done(self.bell, self.context.runner, f"{len(self.flights)} groups in flight")
            return
        with waiting("room for groups", deadline=None, then="they are drawn when the trainer has taken some"):
            await self.bell.wait(None, at_once=True)

    def _tell(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    def _draw(self, num_groups: int) -> None:
        """Start so many groups: interrupted ones first, then what the data source hands out."""
        groups = [self._again.popleft() for _ in range(min(num_groups, len(self._again)))]
        num_groups -= len(groups)
        if num_groups:
            with user_code("--data-source-path: get_samples"):
                answer = self.source.get_samples(num_groups)
            groups += drawn_groups(answer, num_groups, self.rollout_id, self._numbered)
            self._numbered += num_groups
        self._num_drawn += len(groups)
        params = train_sampling_params(self.args)
        for group in groups:
            if needs_nothing(self.context, group):
                self._decide(group, group, self._version())
                continue
            mask_older(self.args, group)
            self.ledger.generating([group])
            size = len(group) + self.context.runner.greedy_baseline
            self.flights.start(group, self._version(), size, partial(self._generate, params, self.rollout_id))

    async def _generate(self, params: dict[str, Any], rollout_id: int, flight: Flight) -> Group:
        runner = CountingRunner(self.context.runner, self.flights, flight, self.wake)
        return await run_group(runner, flight.original, params, rollout_id=rollout_id)  # type: ignore[arg-type]

    # -- deciding ------------------------------------------------------------------------------------

    def _decide(self, group: Group, original: Group, began: int) -> None:
        """Let one finished group wait for training, or give it back, or drop it."""
        finished = self.finished
        outcome, reason = decide(self.context, group, lambda: self._held < finished.wanted)
        self._aborts_in_a_row = self._aborts_in_a_row + 1 if outcome is Outcome.AGAIN else 0
        if outcome is Outcome.AGAIN:
            before = staleness.num_sampled(group)
            returned = prepare_return(self.args, given_back(self.args, original, group), self.rollout_id)
            finished.wasted_tokens += before - staleness.num_sampled(returned)
            self.source.add_samples([returned])
        elif outcome is Outcome.KEPT:
            finished.keep(Finished(group, original, began))
        elif outcome is Outcome.DROPPED:
            finished.drop(Finished(group, original, began, reason))
        else:
            finished.lose(Finished(group, original, began, reason))

    # -- taking --------------------------------------------------------------------------------------

    async def take(self, rollout_id: int) -> Taken:
        """Wait for the groups of a rollout; generation goes on. One `take` at a time, in order of the rollouts.

        Raises:
            RolloutError: No rollout can come about any more, or what the task raised.
            RolloutInterrupted: `context.interrupt` was called; generation has ended, everything in flight is given
                back, and what is finished waits.
        """
        assert not self._taking, "one rollout is taken at a time"
        if self.context.interrupted:
            await self.halt(None if self.args.partial_rollout else 0.0)
            raise RolloutInterrupted
        self.start(rollout_id)
        assert rollout_id == self.rollout_id, f"rollout {self.rollout_id} is next"
        self._taking = True
        try:
            complete = await self.context.until_interrupted(self._completed())
        finally:
            self._taking = False
        if not complete:
            await self.halt(None if self.args.partial_rollout else 0.0)
            raise RolloutInterrupted
        return self._hand_over()

    async def _completed(self) -> None:
        """Return when enough groups wait that the present weights may train on."""
        loop = asyncio.get_running_loop()
        with waiting(f"the groups of rollout {self.rollout_id}", deadline=None, then="every group has its own"):
            self.wake()  # there is room for a whole rollout now
            while True:
                if self._failure is not None:
                    raise self._failure
                held = self._held
                if self._complete():
                    return
                if self._held != held:  # too old: there is room again (a wake without need would come back as news)
                    self.wake()
                self._news = loop.create_future()
                await self._news

    def _complete(self) -> bool:
        """Whether a rollout can be taken. Raises RolloutError when none will come about."""
        finished, version = self.finished, self._version()
        finished.cull(version)
        if len(finished.waiting) >= finished.wanted:
            return True
        if self.flights or not self._exhausted:
            return False
        finished.settle(self.rollout_id, version)
        return True

    def _hand_over(self) -> Taken:
        """The oldest groups that wait, as the rollout; the next one begins."""
        version, engine = self._version(), self.context.runner.engine
        result = self.finished.take(version)
        taken_by, taken = self._taken_by
        self._taken_by = version, len(result.groups) + (taken if taken_by == version else 0)
        now, busy = asyncio.get_running_loop().time(), engine.take_busy_seconds()
        elapsed, self._started_at = now - self._started_at, now
        result.metrics["rollout/groups_drawn"] = float(self._num_drawn)
        result.metrics["rollout/queue/in_flight_groups"] = float(len(self.flights))
        self._sees_requests |= busy > 0  # not those of generate functions that post to the engine
        if elapsed > 0 and self._sees_requests:
            result.metrics["perf/engine_idle_fraction"] = max(0.0, 1.0 - busy / elapsed)
        self._num_drawn = 0
        self._begin(self.rollout_id + 1)
        self.wake()
        return result

    # -- ending, and commits -------------------------------------------------------------------------

    async def halt(self, patience: float | None = None) -> None:
        """End generation for good: what is in flight is aborted and given back, or waits if it is finished.

        Args:
            patience: Seconds that aborted samples get to come back with their tokens; `--rollout-stop-timeout` if None.
        """
        if self._halted:
            return
        flights = await self._land(Limits.of(self.args).stop if patience is None else patience)
        for flight in flights:
            task = flight.task
            group = None if task.cancelled() or task.exception() is not None else task.result()
            if group is not None and is_finished(group):
                self._decide(group, flight.original, flight.began)
                continue
            if group is None:  # cut off between a response and its reward
                self._again.append(restarted(flight.original))
            else:
                self._again.append(given_back(self.args, flight.original, group))
        returned = [prepare_return(self.args, group, self.rollout_id) for group in self._again]
        if returned:
            self.source.add_samples(sorted(returned, key=lambda g: g[0].group_index or 0))
            self._again.clear()

    async def stop(self) -> None:
        """End at once; nothing can be taken any more. Safe to call twice."""
        self._failure = self._failure or RolloutError("generation has been stopped")
        if not self._halted:
            await self._land(0.0)
        self._tell()

    async def _land(self, patience: float) -> list[Flight]:
        """End the task and everything in flight, which is returned; what does not obey is left out, as copies."""
        self._halted = True
        flights, runner = self.flights.take_all(), self.context.runner
        tasks = [flight.task for flight in flights]
        if self._task is not None:
            await ended({self._task})
        if flights:
            runner.stopping = True
            try:
                with waiting("groups in flight at the end", deadline=patience, then="given back as prompts"):
                    await runner.engine.abort()
                    await asyncio.wait(tasks, timeout=patience)
                await ended(tasks)
            finally:
                runner.stopping = False
        # Copies of those that do not obey: they may still write to their samples.
        self._again += [prompts_of(f.original) for f in flights if not f.task.done()]
        return [flight for flight in flights if flight.task.done()]

    def open_groups(self) -> list[OpenGroup]:
        """Every group it holds, for a commit."""
        partial, scores_groups = self.args.partial_rollout, self.context.runner.rewards.scores_groups
        flights = [flight_to_open(f, partial=partial, scores_groups=scores_groups) for f in self.flights]
        return [
            *self.finished.open_groups(),
            *(OpenGroup(group, details={"state": IN_FLIGHT, "began": self._version()}) for group in self._again),
            *flights,
        ]

    def restore_open_groups(self, groups: list[OpenGroup]) -> None:
        """Inverse of `open_groups`, before `start`. Raises CheckpointError for unfinished groups of another size."""
        assert self._task is None, "generation has begun"
        for group in groups:
            if group.details["state"] == IN_FLIGHT:
                self._again.append(check_group_size(group, self.args.n_samples_per_prompt))
            else:
                self.finished.restore(group)
