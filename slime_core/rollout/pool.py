"""`Pool`: the groups between the data source and training, in every mode.

::

    data source --draw--> in flight --ended--> decide (rollout.fate) --kept--> waiting --take--> a rollout
         ^                                       |again     |dropped
         +--------------give_back----------------+          +--> aside, while it may be needed; else gone

With nothing ahead (`rollout.schedule`) a pool is for one rollout: it draws what makes that complete, replaces each
group that goes by exactly one, and gives back the rest, so no prompt is drawn without need. An endless one
(`rollout.producer`) draws while there is room, and rollouts are taken out of it, oldest groups first. Room is while
fewer than `--async-buffer-groups` groups wait (a whole rollout's, while someone takes), fewer than
`--sglang-server-concurrency` samples are unfinished, and, with `--max-staleness`, a group begun now would not be too
old when its turn comes.

Groups are decided on in the order of their drawing, when everything else has settled at the gate, although they end in
any order. And two differences are meant: the budget of one rollout counts the groups drawn, an endless pool's those
gone since the last take; and what is in excess goes through the data source's filters in one, and waits in the other.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from slime_core.plugins.boundary import user_code
from slime_core.protocols import Args
from slime_core.rollout import staleness
from slime_core.rollout.contracts import drawn_groups
from slime_core.rollout.deadlines import Limits, ended, run_group, some_done
from slime_core.rollout.fate import (
    Outcome,
    decide,
    given_back,
    mask_older,
    needs_nothing,
    prepare_return,
    prompts_of,
    restarted,
)
from slime_core.rollout.finished import FinishedGroups
from slime_core.rollout.flights import Bell, Finished, Flight, Flights
from slime_core.rollout.generate import train_sampling_params
from slime_core.types import Group, Sample, SampleStatus
from slime_core.waits import waiting

if TYPE_CHECKING:
    from slime_core.rollout.schedule import RolloutContext

logger = logging.getLogger(__name__)


class Pool:
    """Groups of one data source; all methods belong into one event loop."""

    def __init__(
        self,
        args: Args,
        source: Any,
        context: RolloutContext,
        rollout_id: int = 0,
        *,
        version: Callable[[], int] | None = None,
        told: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            args: The run's settings.
            source: What groups are drawn from, and given back to.
            context: Runner, filters and ledger.
            rollout_id: The first rollout, or the only one.
            version: The pool is endless; answers the newest weight version.
            told: Called whenever groups have been decided on.
        """
        self.args, self.source, self.context = args, source, context
        self._told = told
        self._params = train_sampling_params(args)
        self.bell = Bell()
        self.flights = Flights(self.bell)
        self.finished = FinishedGroups(args, source, context, version)
        self.endless, self.version = self.finished.endless, self.finished.version
        self.ready: deque[Group] = deque()
        """Drawn groups that were finished before: in excess in an earlier rollout, or replayed by the buffer."""
        self.again: deque[Group] = deque()
        """In flight when the run was interrupted, to be generated first."""
        self.taking = self.halted = False
        self.num_returned = self._aborts_in_a_row = 0
        self._held = ExitStack()
        """Has the engine wait while groups are decided on, and at the end until the abort of what is in excess."""
        self.begin(rollout_id)

    def begin(self, rollout_id: int) -> None:
        """Count anew, for the next rollout."""
        self.rollout_id, self.numbered = rollout_id, 0
        self.finished.begin(rollout_id)

    # -- room ----------------------------------------------------------------------------------------

    @property
    def held(self) -> int:
        """Groups that wait for training or may come to."""
        return len(self.finished.waiting) + len(self.flights) + len(self.ready)

    @property
    def missing(self) -> int:
        """Groups to draw so that the rollout could become complete."""
        return self.finished.wanted - self.held

    @property
    def exhausted(self) -> bool:
        """Whether so many groups went, or came back aborted in a row, that no more are drawn for this rollout."""
        args = self.args
        patience = args.dynamic_sampling_budget * args.rollout_batch_size + 2 * args.sglang_server_concurrency
        return (
            self.finished.num_gone + args.rollout_batch_size > self.finished.budget or self._aborts_in_a_row > patience
        )

    def room(self) -> int:
        """How many groups may be started now."""
        args = self.args
        if not self.endless:
            return (
                self.missing if self.finished.num_drawn else max(args.over_sampling_batch_size, args.rollout_batch_size)
            )
        held, wanted = self.held, self.finished.wanted if self.taking else 0
        most_waiting = max(args.async_buffer_groups or args.rollout_batch_size, wanted)
        if self.halted or self.exhausted or len(self.finished.waiting) >= most_waiting:
            return 0
        free = args.sglang_server_concurrency - self.flights.places
        room = math.ceil(free / (args.n_samples_per_prompt + self.context.runner.greedy_baseline))
        if args.num_rollout is not None:
            room = min(room, (args.num_rollout - self.rollout_id) * args.rollout_batch_size - held)
        if args.max_staleness is not None:
            # One begun now is preceded by `taken + held` others that the present weights and their successors train on.
            version, taken = self.finished.taken_by
            taken = taken if version == self.version() else 0
            per_version = args.update_weights_interval * args.rollout_batch_size
            room = min(room, max((args.max_staleness + 1) * per_version - taken - held, wanted - held))
        return int(max(room, 0))

    # -- drawing -------------------------------------------------------------------------------------

    def draw(self, num_groups: int) -> None:
        """Start so many groups, interrupted ones first, or as many as the budget of one rollout has left.

        Raises:
            RolloutError: That ends the run, or the data source answers nonsense.
        """
        if not self.endless:
            left = self.finished.budget - self.finished.num_drawn
            if num_groups > left and self.args.dynamic_sampling_on_exhausted == "stop":
                raise self.finished.exhausted()
            num_groups = min(num_groups, left)
        groups = [self.again.popleft() for _ in range(min(num_groups, len(self.again)))]
        fresh = num_groups - len(groups)
        if fresh > 0:
            with user_code("--data-source-path: get_samples"):
                answer = self.source.get_samples(fresh)
            fresh_groups = drawn_groups(answer, fresh, self.rollout_id, self.numbered)
            self.context.ledger.drawn(fresh_groups)  # those that the source had not numbered
            groups += fresh_groups
            self.numbered += fresh
        self.finished.num_drawn += len(groups)
        self._start(groups)

    def _start(self, groups: list[Group]) -> None:
        runner = self.context.runner
        for group in groups:
            if needs_nothing(self.context, group):
                if self.endless:
                    self.decide(Finished(group, group, self.version()))
                else:
                    self.ready.append(group)
                continue
            mask_older(self.args, group)
            self.context.ledger.generating([group])
            size = len(group) + runner.greedy_baseline
            hold = runner.engine.hold()  # before any turn of the loop in which the engine could step
            self.flights.start(group, self.version(), size, hold, partial(self._generate, self.rollout_id))

    async def _generate(self, rollout_id: int, flight: Flight) -> Group:
        size = flight.unfinished

        def sample_done(siblings: list[Sample]) -> None:
            if any(s.status == SampleStatus.ABORTED for s in siblings):
                return  # the group comes back and needs the place again: it is not given to another one
            self.flights.resize(flight, flight.unfinished - 1)
            if self.endless:
                self.bell.ring()

        def begins() -> None:
            self.flights.resize(flight, size)

        return await run_group(
            self.context.runner, flight.original, self._params,
            rollout_id=rollout_id, begins=begins, sample_done=sample_done, hold=flight.hold,
        )  # fmt: skip

    # -- deciding ------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Draw and decide: until the rollout is complete or the budget is spent, or without end."""
        self.bell.clear()
        while self.endless or len(self.finished.waiting) < self.finished.wanted:
            if (room := self.room()) > 0:
                self.draw(room)
                if self.endless:
                    self.bell.ring()  # what was drawn finished may leave room for more
            if self.ready:
                group = self.ready.popleft()
                self.decide(Finished(group, group, self.version()))
                continue
            self._told()
            if not self.flights and not self.endless:
                self.finished.settle()
                break
            await self._some_ended()
            for flight in self.flights.take_ended():
                self._held.push(flight.hold)
                self.decide(flight.finished())
            if self.endless or len(self.finished.waiting) < self.finished.wanted:
                self._held.close()
        self._held.push(self.context.runner.engine.hold())  # where all were finished before

    async def _some_ended(self) -> None:
        """Until groups have ended and all else is settled, or there is room for more.

        Raises:
            RolloutError: Nothing of what is in flight ends any more.
        """
        if self.flights:
            what = f"{len(self.flights)} groups in flight" if self.endless else f"groups of rollout {self.rollout_id}"
            await some_done(self.bell, self.context.runner, what)
        else:
            with waiting("room for groups", deadline=None, then="they are drawn when the trainer has taken some"):
                await self.bell.wait(None, at_once=True)
        await self.context.runner.engine.settled()
        self.bell.clear()

    def decide(self, group: Finished) -> None:
        """Let one finished group wait for training, or give it back, or drop it."""
        if not self.endless and len(self.finished.waiting) >= self.finished.wanted:
            self.finished.late(group)
            return
        finished = self.finished
        outcome, group.reason = decide(self.context, group.samples, lambda: self.missing > 0)
        self._aborts_in_a_row = self._aborts_in_a_row + 1 if outcome is Outcome.AGAIN else 0
        if outcome is Outcome.KEPT:
            finished.keep(group)
            if self.endless:
                self.context.ledger.buffered([group.samples])
            return
        if outcome is Outcome.AGAIN:
            before = staleness.num_sampled(group.samples)
            (returned,) = self.give_back([given_back(self.args, group.original, group.samples)], group.reason)
            finished.wasted_tokens += before - staleness.num_sampled(returned)
        elif outcome is Outcome.DROPPED:
            finished.drop(group)
        else:
            finished.lose(group)
        if not self.endless and self.missing > 0:
            self.draw(self.missing)

    # -- giving back ---------------------------------------------------------------------------------

    def give_back(self, groups: list[Group], reason: str | None = None) -> list[Group]:
        """Return groups to the data source, which hands them out first next time; as they are returned."""
        groups = [prepare_return(self.args, group, self.rollout_id) for group in groups]
        if groups:
            if not self.endless:
                self.context.ledger.buffered(groups, reason)
            self.source.add_samples(sorted(groups, key=lambda g: g[0].group_index or 0))
            self.num_returned += len(groups)
        return groups

    async def land(self, patience: float | None = None) -> list[Flight]:
        """Abort what is in flight, and cancel it after `patience` seconds (`--rollout-stop-timeout`); all there was.

        A task that does not obey is left behind, and may still write to its samples: its flight gets copies of them.
        """
        patience = Limits.of(self.args).stop if patience is None else patience
        flights = self.flights.take_all()
        for flight in flights:
            self._held.push(flight.hold)
        with self._held:  # until the abort, so that what is given back has as many tokens however long it took
            if flights:
                await self._abort(flights, patience)
        for flight in flights:
            if not flight.task.done():
                flight.original = prompts_of(flight.original)
        return flights

    async def _abort(self, flights: list[Flight], patience: float) -> None:
        runner, what = self.context.runner, f"groups in flight at rollout {self.rollout_id}"
        runner.stopping = True
        try:
            with waiting(what, deadline=patience, then="given back"):
                await runner.engine.abort()
                self._held.close()
                _, late = await asyncio.wait([f.task for f in flights], timeout=patience)
            if late and patience:
                logger.warning(
                    "%d groups did not stop within %.0f s of the abort (--rollout-stop-timeout); cancelled",
                    len(late), patience,
                )  # fmt: skip
            await ended(late)
        finally:
            runner.stopping = False

    async def finish(self, patience: float | None = None) -> None:
        """The end of one rollout: what still runs is given back, with what came when there were enough."""
        for flight in await self.land(patience):
            if finished := flight.result():
                self.finished.late(finished)
            else:
                self.finished.surplus.append(restarted(flight.original))
        for group in self.ready:
            self.finished.late(Finished(group, group))
        self.give_back(self.finished.surplus, "in excess")
