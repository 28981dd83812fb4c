"""Stage 2: prompts -> `rollout_batch_size` generated, scored and kept groups.

This is the built-in rollout function (kind `rollouts`, name `generate`). Groups run concurrently; a dropped group is
replaced by exactly one new one, so nothing is drawn without need::

    data source --draw--> in flight --done---> filter --keep--> accepted   (until rollout_batch_size)
         ^     |--draw--> ready (finished) -/      |drop: draw one more, while the budget lasts
         |                    |
         +----give back-------+ stop (enough accepted)
              partial rollout: with their tokens, finished ones with their rewards; otherwise as fresh prompts

So no drawn prompt is ever lost: it is accepted, dropped by the filter with a counted reason, or given back. What a
reader would get wrong: a finished group that a partial rollout had in excess was sampled by older weights when its
turn comes, as its weight versions say; with `--mask-offpolicy-in-partial-rollout` it is generated afresh instead.
"""

from __future__ import annotations

import asyncio
import copy
import logging
from bisect import insort
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import Any

from slime_core.data.buffer import is_finished
from slime_core.data.ledger import Ledger
from slime_core.errors import RolloutError, RolloutInterrupted
from slime_core.plugins.boundary import user_code
from slime_core.protocols import Args, RolloutTraits, declares
from slime_core.rollout.contracts import drawn_groups
from slime_core.rollout.deadlines import Bell, Limits, dropped_for_good, ended, run_group, some_done
from slime_core.rollout.decisions import (
    Outcome,
    decide,
    given_back,
    keeps_finished,
    mask_older,
    needs_nothing,
    prepare_return,
    spread,
)
from slime_core.rollout.eval_record import EvalRecord
from slime_core.rollout.filters import FilterStage
from slime_core.rollout.generate import SampleRunner, train_sampling_params
from slime_core.rollout.pool import Flight, Flights
from slime_core.rollout.regenerate import restarted
from slime_core.types import Group, RolloutFnEvalOutput, RolloutFnTrainOutput
from slime_core.waits import waiting

logger = logging.getLogger(__name__)


@dataclass
class RolloutContext:
    """What a rollout function gets when it declares the keyword `context`."""

    runner: SampleRunner
    filters: FilterStage
    decided: list[Group] | None = None
    """Every group of the rollout that was kept, dropped or failed, in order of finishing; None: nobody asks."""
    ledger: Ledger = field(default_factory=Ledger)
    """Where a rollout function records what it does with groups, beyond drawing them and giving them back."""
    eval_record: EvalRecord | None = None
    """Where an evaluation finds the groups that it need not do again, and keeps those that it has done."""

    def note(self, group: Group) -> None:
        """A group has been decided on: it will not be drawn again."""
        if self.decided is not None:
            self.decided.append(group)

    # -- ending early --------------------------------------------------------------------------------

    interrupted: bool = False
    """Whether the run is to end, and with it the rollout."""
    _work: tuple[asyncio.AbstractEventLoop, asyncio.Task[None]] | None = None

    def interrupt(self) -> None:
        """End what `until_interrupted` runs, now and from now on; from any thread or signal handler."""
        self.interrupted = True
        if self._work is not None:
            loop, task = self._work
            loop.call_soon_threadsafe(task.cancel)

    async def until_interrupted(self, work: Coroutine[Any, Any, None]) -> bool:
        """Run `work`; False when `interrupt` ended it where it waited."""
        task = asyncio.create_task(work)
        self._work = asyncio.get_running_loop(), task
        if self.interrupted:
            task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            waiter = asyncio.current_task()
            if not self.interrupted or (waiter is not None and waiter.cancelling()):
                raise
            return False
        finally:
            self._work = None
        return True


@dataclass
class _Wave:
    """The state of one call of `generate_rollout`."""

    args: Args
    rollout_id: int
    source: Any
    context: RolloutContext
    bell: Bell = field(default_factory=Bell)
    flights: Flights = field(init=False)
    ready: deque[Group] = field(default_factory=deque)
    """Drawn groups that were finished before: in excess in an earlier rollout, or replayed by the buffer."""
    accepted: list[Group] = field(default_factory=list)
    originals: dict[int, Group] = field(default_factory=dict)
    """`id` of a finished group -> the group as it was drawn, whose samples a fan-out may have replaced."""
    surplus: list[Group] = field(default_factory=list)
    """Finished when there were enough."""
    aside: list[tuple[tuple[float, int], Group]] = field(default_factory=list)
    """Dropped groups that fill the rollout if the budget runs out, best first, each with what orders it."""
    drop_reasons: dict[int, str] = field(default_factory=dict)
    """`id` of a group put aside -> the filter's reason."""
    held: ExitStack = field(default_factory=ExitStack)
    """Keeps complete groups live until they are decided on."""
    undecided: int = 0
    """How many."""
    drawn: int = 0
    returned: int = 0
    num_surplus: int = 0
    fewer: int = 0
    """Groups that `--group-timeout-policy drop` took from the rollout."""

    def __post_init__(self) -> None:
        self.flights = Flights(self.bell)

    @property
    def wanted(self) -> int:
        """Groups that make the rollout complete."""
        return int(self.args.rollout_batch_size) - self.fewer

    @property
    def missing(self) -> int:
        """Groups to draw so that the rollout could become complete."""
        in_hand = len(self.accepted) + len(self.flights) + len(self.ready)
        return self.wanted - in_hand

    @property
    def keeps_finished(self) -> bool:
        """Groups in excess are trained on in the next rollout, as they are."""
        return keeps_finished(self.args)

    # -- drawing -------------------------------------------------------------------------------------

    def draw(self, num_groups: int) -> None:
        """Start that many groups, or as many as the budget has left. Raises RolloutError where that ends the run."""
        budget = self.args.dynamic_sampling_budget * self.args.rollout_batch_size
        left = max(budget, self.args.over_sampling_batch_size) - self.drawn
        if num_groups > left and self.args.dynamic_sampling_on_exhausted == "stop":
            raise self.exhausted()
        num_groups = min(num_groups, left)
        if num_groups <= 0:
            return
        params = train_sampling_params(self.args)
        with user_code("--data-source-path: get_samples"):
            answer = self.source.get_samples(num_groups)
        groups = drawn_groups(answer, num_groups, self.rollout_id, self.drawn)
        self.context.ledger.drawn(groups)  # those that the source had not numbered
        for group in groups:
            if needs_nothing(self.context, group):
                self.ready.append(group)
                continue
            mask_older(self.args, group)
            self.context.ledger.generating([group])
            self.flights.start(group, 0, len(group), partial(self.generate, params))
        self.drawn += num_groups

    async def generate(self, params: dict[str, Any], flight: Flight) -> Group:
        """One group; the engine waits until it is decided on, so that a reward's speed changes nothing."""
        runner = self.context.runner
        finished = await run_group(runner, flight.original, params, rollout_id=self.rollout_id)
        if not runner.stopping:
            self.held.enter_context(runner.engine.live())
            self.undecided += 1
        return finished

    def refill(self) -> None:
        """Replace what was dropped, and not more."""
        if self.missing > 0:
            self.draw(self.missing)

    # -- deciding ------------------------------------------------------------------------------------

    def take(self, original: Group, group: Group) -> None:
        """Accept, drop or give back one finished group."""
        if len(self.accepted) >= self.wanted:
            self.take_late(original, group)
            return
        self.originals[id(group)] = original
        outcome, reason = decide(self.context, group, lambda: self.missing > 0)
        self.fewer += dropped_for_good(group)
        if outcome is Outcome.KEPT:
            self.accepted.append(group)
            return
        if outcome is Outcome.AGAIN:
            self.give_back([given_back(self.args, original, group)], reason)
        elif outcome is Outcome.DROPPED:
            self.drop(group, reason or "dropped")
        self.refill()

    def drop(self, group: Group, reason: str) -> None:
        """Put a dropped group aside while it may be needed, else tell the data source that it is gone."""
        self.drop_reasons[id(group)] = reason
        key = (-spread(self.args, group), group[0].group_index or 0)
        insort(self.aside, (key, group), key=itemgetter(0))
        limit = self.wanted - len(self.accepted)
        self.forget(limit if self.args.dynamic_sampling_on_exhausted == "keep" else 0)

    def forget(self, limit: int) -> None:
        """Keep the best `limit` of the groups put aside."""
        observe: Callable[..., None] | None = getattr(self.source, "observe", None)
        for _, group in self.aside[limit:]:
            self.context.ledger.dropped(group, self.drop_reasons.pop(id(group)))
            if observe is not None:
                observe([group], False)
        del self.aside[limit:]

    # -- outcomes ------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Draw and decide until the rollout is complete or the budget is spent."""
        self.draw(max(self.args.over_sampling_batch_size, self.args.rollout_batch_size))
        while len(self.accepted) < self.wanted:
            if self.ready:
                group = self.ready.popleft()
                self.take(group, group)
                continue
            if not self.flights:
                self.settle()
                break
            self.bell.clear()
            await some_done(self.bell, self.context.runner, f"groups of rollout {self.rollout_id}")
            await self.context.runner.engine.settled(lambda: self.undecided)
            for flight in self.flights.take_ended():
                self.take(flight.original, flight.task.result())
            self.release()
        if self.fewer:
            self.trim(f"{self.fewer} groups were over --group-timeout")
        self.forget(0)

    def release(self) -> None:
        """Let the engine go on: everything that is complete has been decided on."""
        self.held.close()
        self.undecided = 0

    def settle(self) -> None:
        """The budget is spent: `--dynamic-sampling-on-exhausted` says what becomes of the rollout."""
        wanted = self.wanted
        if self.args.dynamic_sampling_on_exhausted == "keep":
            best = self.aside[: wanted - len(self.accepted)]
            del self.aside[: len(best)]
            for _, group in best:
                self.accepted.append(group)
                self.context.filters.count_kept("exhausted")
            if len(self.accepted) < wanted:
                raise self.exhausted()
            return
        self.trim("the budget is spent")

    def trim(self, why: str) -> None:
        """Go on with as many groups as whole optimizer steps take; the others are in excess."""
        per_step = self.args.global_batch_size // self.args.n_samples_per_prompt
        usable = len(self.accepted) // per_step * per_step
        if usable == 0:
            raise self.exhausted()
        self.accepted.sort(key=lambda g: g[0].group_index or 0)
        self.surplus.extend(self.accepted[usable:])
        self.num_surplus += len(self.accepted) - usable
        del self.accepted[usable:]
        self.context.ledger.short(self.rollout_id, why)
        logger.warning(
            "rollout %d: %s, so it has %d groups instead of %d",
            self.rollout_id, why, usable, self.args.rollout_batch_size,
        )  # fmt: skip

    def exhausted(self) -> RolloutError:
        """The error of a spent budget."""
        return RolloutError(
            f"rollout {self.rollout_id}: {self.drawn} groups drawn and only {len(self.accepted)} of"
            f" {self.args.rollout_batch_size} kept (not kept: {self.context.filters.take_metrics()}); raise"
            f" --dynamic-sampling-budget (now {self.args.dynamic_sampling_budget}), or see to why groups are"
            " dropped, fail or come back aborted; --dynamic-sampling-on-exhausted names other outcomes than this"
        )

    def give_back(self, groups: list[Group], reason: str | None = None) -> None:
        """Return groups to the data source, which hands them out first next time."""
        groups = [prepare_return(self.args, group, self.rollout_id) for group in groups]
        if groups:
            self.context.ledger.buffered(groups, reason or "in excess")
            self.source.add_samples(sorted(groups, key=lambda g: g[0].group_index or 0))
            self.returned += len(groups)

    async def stop(self, patience: float | None = None) -> None:
        """Abort what still runs and give it back; after `patience` (`--rollout-stop-timeout`) it is cancelled."""
        patience = Limits.of(self.args).stop if patience is None else patience
        self.release()
        runner, flights = self.context.runner, self.flights.take_all()
        tasks = [flight.task for flight in flights]
        if tasks:
            runner.stopping = True
            try:
                with waiting(f"groups in excess of rollout {self.rollout_id}", deadline=patience, then="given back"):
                    await runner.engine.abort()
                    _, late = await asyncio.wait(tasks, timeout=patience)
                if late and patience:
                    logger.warning(
                        "%d groups did not stop within %.0f s of the abort (--rollout-stop-timeout); cancelled",
                        len(late), patience,
                    )  # fmt: skip
                await ended(late)
            finally:
                runner.stopping = False
        for flight in flights:
            task, original = flight.task, flight.original
            if not task.done():  # it does not obey, and may still write to its samples
                original = copy.deepcopy(original)
            if not task.done() or task.cancelled() or task.exception() is not None:
                # A sample cut off between its response and its reward cannot go on.
                self.surplus.append(restarted(original))
            else:
                self.take_late(original, task.result())
        for group in self.ready:
            self.take_late(group, group)
        self.give_back(self.surplus)

    def undo(self) -> None:
        """Have `stop` give back what was accepted, too, and what is put aside; what the filter dropped stays so."""
        for group in [*self.accepted, *(group for _, group in self.aside)]:
            self.take_late(self.originals[id(group)], group)
        self.accepted.clear()
        self.aside.clear()

    def take_late(self, original: Group, group: Group) -> None:
        """One group that came when there were enough."""
        self.num_surplus += is_finished(group)
        self.surplus.append(given_back(self.args, original, group))


# It accounts for every group that it draws.
@declares(RolloutTraits(leaves_out=False, records_evaluation=True))
async def generate_rollout(
    args: Args, rollout_id: int, data_source: Any, evaluation: bool = False, *, context: RolloutContext
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Generate one rollout. Groups come back ordered by `group_index`, whatever order they finished in.

    Raises:
        RolloutError: The budget ran out and that is to stop the run, or too many samples failed in a row.
        RolloutInterrupted: `context.interrupt` was called; everything that was not dropped has been given back.
    """
    if evaluation:
        from slime_core.rollout.evaluate import evaluate_datasets

        return await evaluate_datasets(args, data_source, context.runner, rollout_id, record=context.eval_record)
    wave = _Wave(args, rollout_id, data_source, context)
    try:
        complete = await context.until_interrupted(wave.run())
    except BaseException:  # ctrl-C too: what a reward that hangs would answer is of no use any more
        await wave.stop(patience=0.0)
        raise
    if not complete:
        wave.undo()
        # Rewards still at work are worth waiting for where their samples are kept.
        await wave.stop(patience=None if args.partial_rollout else 0.0)
        context.filters.take_metrics()
        raise RolloutInterrupted
    await wave.stop()
    metrics = {
        **context.filters.take_metrics(),
        "rollout/groups_drawn": float(wave.drawn),
        "rollout/groups_given_back": float(wave.returned),
        "rollout/surplus_groups": float(wave.num_surplus),
        "rollout/surplus_groups_kept": float(wave.num_surplus if wave.keeps_finished else 0),
    }
    return RolloutFnTrainOutput(sorted(wave.accepted, key=lambda g: g[0].group_index or 0), metrics)
