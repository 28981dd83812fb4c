"""`Pool`: the groups between the data source and training, in every mode.

::

    data source --draw--> in flight --ended--> decide (rollout.fate) --kept--> waiting --take--> a rollout
         ^                                       |again     |dropped
         +--------------give_back----------------+          +--> aside, while it may be needed; else gone

There are two kinds. `OneRollout` draws the groups of one rollout, replaces each lost group by exactly one, and gives
back the rest, so no prompt is drawn without need; `generate_rollout`, the built-in rollout function, is made of it.
`rollout.producer.GroupProducer` draws without end while there is room; rollouts are taken from it, oldest groups first.

Groups may end in any order, but the pool decides on them in the order of drawing, once the gate has settled. So a slow
reward changes no result. Two differences between the kinds are intended. The budget of `OneRollout` counts the groups
drawn; the budget of an endless pool counts the groups lost since the last take. Surplus groups of `OneRollout` go back
through the data source's filters; those of an endless pool wait.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from bisect import insort
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter
from typing import ClassVar

from slime_core.data.buffer import is_finished
from slime_core.data.ledger import Ledger
from slime_core.errors import RolloutError, RolloutInterrupted, rollout_name
from slime_core.protocols import Args, DataSource, RolloutTraits, declares
from slime_core.rollout import staleness
from slime_core.rollout.deadlines import Interruptible, ended, group_runner, some_done
from slime_core.rollout.evaluate import EvalRecord, evaluate_datasets
from slime_core.rollout.fate import (
    FilterStage,
    Outcome,
    decide,
    dropped_for_good,
    given_back,
    keeps_finished,
    mask_older,
    needs_nothing,
    prepare_return,
    prompts_of,
    restarted,
)
from slime_core.rollout.gate import Hold
from slime_core.rollout.generate import SampleRunner, train_sampling_params
from slime_core.sample import Group, RolloutFnEvalOutput, RolloutFnTrainOutput, Sample
from slime_core.sample.types import executions
from slime_core.waits import waiting
from slime_core.workers.call import user_code

logger = logging.getLogger(__name__)

_INDEX_STRIDE = 1 << 20
"""Count of numbers reserved per rollout for samples without a number; a resumed run assigns the same numbers."""


@dataclass
class RolloutContext:
    """The value of the keyword `context` of a rollout function that declares it."""

    runner: SampleRunner
    filters: FilterStage
    decided: list[Group] | None = None
    """Groups of the rollout that were kept, dropped or failed, in order of finishing; None if no hook needs them."""
    ledger: Ledger = field(default_factory=Ledger)
    """Record of the function's decisions about groups, besides draws and returns."""
    eval_record: EvalRecord | None = None
    """Record of the groups that an evaluation has finished, so that it does not repeat them."""
    work: Interruptible = field(default_factory=Interruptible)
    """Work cancelled when the run stops."""

    def note(self, group: Group) -> None:
        """Record that a group has been decided on and will not be drawn again."""
        if self.decided is not None:
            self.decided.append(group)

    async def until_interrupted(self, work: Coroutine[object, None, None]) -> bool:
        """Run `work`; return False if the end of the run cancelled it."""
        try:
            await self.work.run(work)
        except RolloutInterrupted:
            return False
        return True


@dataclass
class Finished:
    """A group that was generated and accepted or dropped."""

    samples: Group
    original: Group
    """The group as it was drawn; its samples differ from `samples` if a generate function fanned out."""
    began: int = 0
    """Weight version served when its generation began."""
    reason: str | None = None
    """Reason of the filter for dropping it."""
    spread: float = 0.0
    """Rank among dropped groups (`FilterDecision.spread`)."""

    @cached_property
    def span(self) -> tuple[int, int] | None:
        """Return the oldest and newest version of its tokens."""
        return staleness.version_span(self.samples, self.began)

    @property
    def retries(self) -> int:
        """Return the number of times it was regenerated because of its age."""
        return staleness.retries(self.original)

    @property
    def index(self) -> int:
        """Return the `group_index`."""
        return self.samples[0].group_index or 0

    @property
    def turn(self) -> tuple[int, int]:
        """Return the sort key of groups for training: oldest version first, then the order of drawing."""
        return (self.span[0] if self.span else self.began, self.index)


@dataclass(eq=False, slots=True)
class Flight:
    """A group that is being generated."""

    original: Group
    """The group as it was drawn."""
    began: int
    """Weight version served when its generation began."""
    number: int
    """Sequence number in the order of drawing."""
    unfinished: int
    """Number of samples that have not ended."""
    hold: Hold
    """Makes the engine wait while the group is about to run, and until it is accepted or dropped."""
    task: asyncio.Task[Group] = field(init=False)

    @property
    def places(self) -> int:
        """Return the places that it occupies: at least 1, or groups waiting for a --group-rm reward would pile up."""
        return max(self.unfinished, 1)

    def finished(self) -> Finished:
        """Return the finished group of a task that has ended. Raises the task's exception."""
        return Finished(self.task.result(), self.original, self.began)

    def result(self) -> Finished | None:
        """Return the finished group; None if the task still runs, raised, or was cut off before the reward."""
        task = self.task
        return None if not task.done() or task.cancelled() or task.exception() is not None else self.finished()


class Pool:
    """The groups of one data source; all methods must be called in one event loop."""

    endless: ClassVar[bool]

    def __init__(
        self,
        args: Args,
        source: DataSource,
        context: RolloutContext,
        rollout_id: int = 0,
        version: Callable[[], int] = lambda: 0,
    ) -> None:
        """
        Args:
            args: The run's settings.
            source: Data source of the groups, to which they are also given back.
            context: Runner, filters and ledger.
            rollout_id: The first rollout, or the only one.
            version: Returns the newest weight version, if the pool needs it.
        """
        self.args, self.source, self.context, self.version = args, source, context, version
        self._params, self._run = train_sampling_params(args), group_runner(context.runner)
        self.bell = asyncio.Event()
        """Event that is set when a group has ended or there may be room."""
        self.flights: dict[int, Flight] = {}
        """Groups in generation or awaiting a decision, by number, in the order of drawing."""
        self._numbers = itertools.count()
        self._ended: list[Flight] = []
        """Flights that have ended, in the order of their ends, so an end costs the same for any number in flight."""
        self.places = 0
        """Places used by all flights."""
        self.again: deque[Group] = deque()
        """Groups that were in flight when the run was interrupted, to be generated first."""
        self.ready: deque[Finished] = deque()
        """Drawn groups that were finished before (surplus of a rollout, or replayed) and wait for a decision."""
        self.waiting: list[Finished] = []
        """Accepted groups waiting for training."""
        self.aside: list[tuple[tuple[float, int], Finished]] = []
        """Dropped groups that fill the rollout if the budget runs out, best first, each with its sort key."""
        self.num_returned = 0
        self._held = ExitStack()
        """Makes the engine wait while groups are decided on, and at the end until surplus groups are aborted."""
        self.begin(rollout_id)

    def begin(self, rollout_id: int) -> None:
        """Reset the counters for the next rollout."""
        self.rollout_id, self.numbered = rollout_id, 0
        self.wanted = int(self.args.rollout_batch_size)
        """Number of groups in a complete rollout; fewer after `--group-timeout-policy drop` or a spent budget."""
        self.num_drawn = self.num_gone = self.wasted_tokens = 0

    @property
    def held(self) -> int:
        """Return the number of groups that wait for training, or may come to wait."""
        return len(self.waiting) + len(self.flights) + len(self.ready)

    @property
    def missing(self) -> int:
        """Return the number of groups to draw so that the rollout can become complete."""
        return self.wanted - self.held

    # -- drawing -------------------------------------------------------------------------------------

    def draw(self, num_groups: int) -> None:
        """Start the given number of groups, interrupted ones first.

        Raises:
            RolloutError: The data source returns invalid groups.
        """
        groups = [self.again.popleft() for _ in range(min(num_groups, len(self.again)))]
        fresh = num_groups - len(groups)
        if fresh > 0:
            with user_code("--data-source-path: get_samples"):
                answer = self.source.get_samples(fresh)
            fresh_groups = drawn_groups(answer, fresh, self.rollout_id, self.numbered)
            self.context.ledger.drawn(fresh_groups)  # those that the source had not numbered
            groups += fresh_groups
            self.numbered += fresh
        self.num_drawn += len(groups)
        runner = self.context.runner
        for group in groups:
            if needs_nothing(self.context, group):
                self.ready.append(Finished(group, group, self.version()))
                continue
            mask_older(self.args, group)
            self.context.ledger.generating([group])
            size = len(group) + runner.greedy_baseline
            hold = runner.engine.hold()  # before any turn of the loop in which the engine could step
            flight = Flight(group, self.version(), next(self._numbers), size, hold)
            flight.task = asyncio.create_task(self._generate(flight, self.rollout_id))
            self.flights[flight.number] = flight
            self.places += flight.places

    async def _generate(self, flight: Flight, rollout_id: int) -> Group:
        try:
            watchers = self._watchers(flight)
            return await self._run(flight.original, self._params, rollout_id=rollout_id, hold=flight.hold, **watchers)
        finally:
            flight.hold.complete()
            self._ended.append(flight)
            self.bell.set()

    def _watchers(self, flight: Flight) -> dict[str, object]:
        """Return the callbacks of the group's run, as keyword arguments of `deadlines.group_runner`'s function."""
        return {}

    # -- deciding ------------------------------------------------------------------------------------

    async def _decide_ended(self) -> None:
        """Decide on ended groups once the engine has settled; the engine then waits until `_held` is closed."""
        await self.context.runner.engine.settled()
        self.bell.clear()
        ended, self._ended = sorted(self._ended, key=lambda f: f.number), []
        for flight in ended:
            del self.flights[flight.number]
            self.places -= flight.places
            self._held.push(flight.hold)
            self.decide(flight.finished())

    def decide(self, group: Finished) -> Outcome | None:
        """Decide on a finished group: keep it for training, give it back, or drop it."""
        outcome, group.reason, group.spread = decide(self.context, group.samples, lambda: self.missing > 0)
        if outcome is Outcome.KEPT:
            self.keep(group)
        elif outcome is Outcome.AGAIN:
            before = staleness.num_sampled(group.samples)
            (returned,) = self.give_back([given_back(self.args, group.original, group.samples)], group.reason)
            self.wasted_tokens += before - staleness.num_sampled(returned)
        elif outcome is Outcome.DROPPED:
            self.num_gone += 1
            self.put_aside(group)
            limit = self.wanted - (0 if self.endless else len(self.waiting))
            self.forget(limit if self.args.dynamic_sampling_on_exhausted == "keep" else 0)
        else:
            self.lose(group)
        return outcome

    def keep(self, group: Finished) -> None:
        """Add a group to the groups that wait for training."""
        self.waiting.append(group)

    def lose(self, group: Finished) -> None:
        """Lose a group that cannot be trained on; the ledger already has the event."""
        raise NotImplementedError

    def put_aside(self, group: Finished) -> None:
        """Keep a dropped group while it may be needed to fill the rollout."""
        insort(self.aside, ((-group.spread, group.index), group), key=itemgetter(0))

    def forget(self, limit: int) -> None:
        """Keep the best `limit` of the groups put aside; report the others as gone to ledger and data source."""
        observe: Callable[..., None] | None = getattr(self.source, "observe", None)
        for _, group in self.aside[limit:]:
            self.context.ledger.dropped(group.samples, group.reason or "dropped")
            if observe is not None:
                observe([group.samples], False)
            self._waste(group)
        del self.aside[limit:]

    def _waste(self, group: Finished) -> None:
        self.wasted_tokens += staleness.num_sampled(group.samples)

    # -- a spent budget ------------------------------------------------------------------------------

    @property
    def budget(self) -> int:
        """Return the number of groups that may be drawn, or lost, for one rollout."""
        args = self.args
        return max(args.dynamic_sampling_budget * args.rollout_batch_size, args.over_sampling_batch_size)

    def settle(self) -> None:
        """Apply `--dynamic-sampling-on-exhausted` when the budget is spent.

        Raises:
            RolloutError: The setting ends the run, or the groups do not fill one optimizer step.
        """
        if self.args.dynamic_sampling_on_exhausted == "keep":
            usable = [entry for entry in self.aside if self.verdict(entry[1]).trains]
            for entry in usable[: max(self.wanted - len(self.waiting), 0)]:
                self.aside.remove(entry)
                self.keep(entry[1])
                self.context.filters.count_kept("exhausted")
        if len(self.waiting) < self.wanted:
            if self.args.dynamic_sampling_on_exhausted != "shrink":
                raise self.budget_spent()
            self.trim("the budget is spent")

    def verdict(self, group: Finished) -> staleness.Verdict:
        """Return the staleness verdict on a group for training at the newest weights."""
        return staleness.judge(self.args, group.span, group.retries, self.version())

    def trim(self, why: str) -> None:
        """Reduce the rollout to the groups of whole optimizer steps; the other groups are surplus, or wait."""
        args = self.args
        per_step = args.global_batch_size // args.n_samples_per_prompt
        usable = len(self.waiting) // per_step * per_step
        if usable == 0:
            raise self.budget_spent()
        so = f"{why}, so it has {usable} groups instead of {args.rollout_batch_size}"
        self._shrink(usable)
        self.context.ledger.short(self.rollout_id, so if self.endless else why)
        logger.warning("%s: %s", rollout_name(self.rollout_id), so)

    def _shrink(self, usable: int) -> None:
        raise NotImplementedError

    def budget_spent(self) -> RolloutError:
        """Return the error of a spent budget."""
        args, waiting = self.args, f"{len(self.waiting)} of {self.args.rollout_batch_size}"
        if self.endless:
            counted = f"{self.num_gone} groups went since the rollout before, and only {waiting} wait for training"
            causes = "fail, come back aborted or become too old"
        else:
            counted, causes = f"{self.num_drawn} groups drawn and only {waiting} kept", "fail or come back aborted"
        return RolloutError(
            f"{rollout_name(self.rollout_id)}: {counted} (not kept: {self.context.filters.take_metrics()}); raise"
            f" --dynamic-sampling-budget (now {args.dynamic_sampling_budget}), or see to why groups are dropped,"
            f" {causes}; --dynamic-sampling-on-exhausted names other outcomes than this"
        )

    # -- giving back ---------------------------------------------------------------------------------

    def give_back(self, groups: list[Group], reason: str | None = None) -> list[Group]:
        """Give groups back to the data source, which draws them first next time; return the groups as given back."""
        groups = [prepare_return(self.args, group, self.rollout_id) for group in groups]
        if groups:
            if not self.endless:
                self.context.ledger.buffered(groups, reason)
            self.source.add_samples(sorted(groups, key=lambda g: g[0].group_index or 0))
            self.num_returned += len(groups)
        return groups

    async def land(self, patience: float | None = None) -> list[Flight]:
        """Abort the flights, cancel them after `patience` seconds (`--rollout-stop-timeout`), and return all of them.

        A task that ignores the cancellation is left running and may still write to its samples, so its flight gets
        copies of them.
        """
        patience = self.args.rollout_stop_timeout if patience is None else patience
        flights = list(self.flights.values())
        self.flights.clear()
        self._ended.clear()
        self.places = 0
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
        runner, what = self.context.runner, f"groups in flight at {rollout_name(self.rollout_id)}"
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


class OneRollout(Pool):
    """The groups of one rollout."""

    endless = False

    def __init__(self, args: Args, source: DataSource, context: RolloutContext, rollout_id: int) -> None:
        self.surplus: list[Group] = []
        """Surplus groups to give back."""
        self.num_surplus = 0
        """Number of finished surplus groups."""
        super().__init__(args, source, context, rollout_id)

    async def fill(self) -> None:
        """Draw and decide until the rollout is complete, or cannot become more complete."""
        args = self.args
        self.draw(max(args.over_sampling_batch_size, args.rollout_batch_size))
        while len(self.waiting) < self.wanted:
            if self.missing > 0:
                self.draw(self.missing)
            if self.ready:
                self.decide(self.ready.popleft())
                continue
            if not self.flights:
                self.settle()
                break
            await some_done(self.bell, self.context.runner, f"groups of {rollout_name(self.rollout_id)}")
            await self._decide_ended()
            if len(self.waiting) < self.wanted:
                self._held.close()
        self._held.push(self.context.runner.engine.hold())  # where all were finished before
        if over := args.rollout_batch_size - self.wanted:
            self.trim(f"{over} groups were over --group-timeout")
        self.forget(0)

    def draw(self, num_groups: int) -> None:
        """Draw groups, at most as many as the budget has left. Raises RolloutError if a spent budget stops the run."""
        left = self.budget - self.num_drawn
        if num_groups > left and self.args.dynamic_sampling_on_exhausted == "stop":
            raise self.budget_spent()
        super().draw(min(num_groups, left))

    def decide(self, group: Finished) -> Outcome | None:
        """Decide on a group; set it aside as surplus if enough groups wait, and draw another if it is not kept."""
        if len(self.waiting) >= self.wanted:
            self.late(group)
            return None
        outcome = super().decide(group)
        if outcome is not Outcome.KEPT and self.missing > 0:
            self.draw(self.missing)
        return outcome

    def lose(self, group: Finished) -> None:
        """Reduce the wanted number if the group was dropped permanently; the ledger has recorded the drop already."""
        if dropped_for_good(group.samples):
            self.wanted -= 1

    def _shrink(self, usable: int) -> None:
        self.waiting.sort(key=lambda f: f.index)
        for group in self.waiting[usable:]:
            self.late(group)
        del self.waiting[usable:]

    def late(self, group: Finished) -> None:
        """Mark a group as surplus."""
        self.num_surplus += is_finished(group.samples)
        self.surplus.append(given_back(self.args, group.original, group.samples))

    def undo(self) -> None:
        """Mark waiting groups and groups put aside as surplus for `finish`; dropped groups stay dropped."""
        for group in [*self.waiting, *(group for _, group in self.aside)]:
            self.late(group)
        self.waiting.clear()
        self.aside.clear()

    async def finish(self, patience: float | None = None) -> None:
        """Land the groups in flight and give them back, together with the surplus groups."""
        for flight in await self.land(patience):
            if finished := flight.result():
                self.late(finished)
            else:
                self.surplus.append(restarted(flight.original))
        for group in self.ready:
            self.late(group)
        self.give_back(self.surplus, "in excess")


# The function accounts for every group that it draws.
@declares(RolloutTraits(leaves_out=False, records_evaluation=True))
async def generate_rollout(
    args: Args, rollout_id: int, data_source: DataSource, evaluation: bool = False, *, context: RolloutContext
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Generate a rollout. Groups are returned in order of `group_index`, regardless of the order of finishing.

    No drawn prompt is lost: it is accepted, dropped by the filter with a counted reason, or given back. A partial
    rollout gives back groups with their tokens, and finished groups with their rewards. Such a finished surplus group
    is trained on later, although older weights sampled it, as its weight versions show. With
    `--mask-offpolicy-in-partial-rollout` the group is regenerated instead.

    Raises:
        RolloutError: The budget ran out and the settings stop the run then, or too many samples failed in a row.
        RolloutInterrupted: `context.work.interrupt` was called; all groups that were not dropped have been given back.
    """
    if evaluation:
        return await evaluate_datasets(args, data_source, context.runner, rollout_id, record=context.eval_record)
    pool = OneRollout(args, data_source, context, rollout_id)
    try:
        complete = await context.until_interrupted(pool.fill())
    except BaseException:  # ctrl-C too: the result of a hanging reward is useless now
        await pool.finish(patience=0.0)
        raise
    if not complete:
        pool.undo()
        # Wait for running rewards only if their samples are kept.
        await pool.finish(patience=None if args.partial_rollout else 0.0)
        context.filters.take_metrics()
        raise RolloutInterrupted
    await pool.finish()
    metrics = {
        **context.filters.take_metrics(),
        "rollout/groups_drawn": float(pool.num_drawn),
        "rollout/groups_given_back": float(pool.num_returned),
        "rollout/surplus_groups": float(pool.num_surplus),
        "rollout/surplus_groups_kept": float(pool.num_surplus if keeps_finished(args) else 0),
    }
    return RolloutFnTrainOutput([f.samples for f in sorted(pool.waiting, key=lambda f: f.index)], metrics)


# -- what a data source returns ----------------------------------------------------------------------


def first_number(rollout_id: int) -> int:
    """Return the `group_index` of the first group that a rollout draws from a data source without numbering."""
    return rollout_id * _INDEX_STRIDE


def drawn_groups(answer: object, num_groups: int, rollout_id: int, numbered: int) -> list[Group]:
    """Check a data source's result: `num_groups` non-empty lists of samples; number the unnumbered samples.

    Args:
        answer: Result of `get_samples(num_groups)`.
        num_groups: Number of requested groups.
        rollout_id: The rollout that draws the groups.
        numbered: Number of groups that this rollout drew before.
    """
    expected = f"--data-source-path: get_samples({num_groups}) must return {num_groups} non-empty lists of Samples"
    if not isinstance(answer, list) or not all(isinstance(g, list) and g for g in answer):
        raise RolloutError(f"{expected}; it returned {shape_of(answer)}")
    if not all(isinstance(s, Sample) for group in answer for s in group):
        raise RolloutError(f"{expected}; a group held {shape_of(answer[0])}")
    if len(answer) != num_groups:
        raise RolloutError(f"{expected}; it returned {len(answer)}")
    next_group = first_number(rollout_id) + numbered
    for offset, group in enumerate(answer):
        for position, sample in enumerate(group):
            # Without their own numbers, all samples of a group would be sampled with the same seed.
            if sample.group_index is None:
                sample.group_index = next_group + offset
            if sample.index is None:
                sample.index = (next_group + offset) * len(group) + position
        members = [siblings[0] for siblings in executions(group)]  # a partial rollout may bring siblings back
        if len({s.index for s in members}) < len(members) and not is_finished(group):
            raise RolloutError(
                f"--data-source-path: the samples of group {group[0].group_index} share an index"
                f" ({[s.index for s in group]}); every sample needs its own"
            )
    return answer


def shape_of(value: object) -> str:
    """Return a short description of a value of a wrong type, for errors."""
    if isinstance(value, Mapping):
        return f"a mapping with keys {sorted(map(str, value))}"
    if isinstance(value, list):
        return f"a list of {len(value)} {type(value[0]).__name__}" if value else "an empty list"
    return type(value).__name__
