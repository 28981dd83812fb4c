"""Stage 2: prompts -> `rollout_batch_size` generated, scored and kept groups.

This is the built-in rollout function (kind `rollouts`, name `generate`): a pool (`rollout.pool`) for one rollout. No
drawn prompt is lost: it is accepted, dropped by the filter with a counted reason, or given back, by a partial rollout
with its tokens, and finished ones with their rewards. A finished group that a partial rollout had in excess was sampled
by older weights when its turn comes, as its weight versions say; with `--mask-offpolicy-in-partial-rollout` it is
regenerated instead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from slime_core.data.buffer import is_finished
from slime_core.data.ledger import Ledger
from slime_core.errors import RolloutInterrupted
from slime_core.protocols import Args, RolloutTraits, declares
from slime_core.rollout.deadlines import some_done
from slime_core.rollout.evaluations import Interruptible
from slime_core.rollout.fate import Outcome, dropped_for_good, given_back, keeps_finished, restarted
from slime_core.rollout.filters import FilterStage
from slime_core.rollout.generate import SampleRunner
from slime_core.rollout.pool import Finished, Pool
from slime_core.types import Group, RolloutFnEvalOutput, RolloutFnTrainOutput

if TYPE_CHECKING:
    from slime_core.rollout.eval_record import EvalRecord


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
    work: Interruptible = field(default_factory=Interruptible)
    """What the end of the run ends."""

    def note(self, group: Group) -> None:
        """A group has been decided on: it will not be drawn again."""
        if self.decided is not None:
            self.decided.append(group)

    async def until_interrupted(self, work: Coroutine[Any, Any, None]) -> bool:
        """Run `work`; False when the end of the run ended it where it waited."""
        try:
            await self.work.run(work)
        except RolloutInterrupted:
            return False
        return True


class OneRollout(Pool):
    """The groups of one rollout."""

    endless = False

    def __init__(self, args: Args, source: Any, context: RolloutContext, rollout_id: int) -> None:
        self.ready: deque[Finished] = deque()
        """Drawn groups that were finished before, to be decided on."""
        self.surplus: list[Group] = []
        """In excess, to be given back."""
        self.num_surplus = 0
        """How many of those were finished."""
        super().__init__(args, source, context, rollout_id)

    @property
    def held(self) -> int:
        """Groups that wait for training or may come to."""
        return super().held + len(self.ready)

    async def fill(self) -> None:
        """Draw and decide until the rollout is complete, or as complete as it gets."""
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
            await some_done(self.bell, self.context.runner, f"groups of rollout {self.rollout_id}")
            await self._decide_ended()
            if len(self.waiting) < self.wanted:
                self._held.close()
        self._held.push(self.context.runner.engine.hold())  # where all were finished before
        if over := args.rollout_batch_size - self.wanted:
            self.trim(f"{over} groups were over --group-timeout")
        self.forget(0)

    def draw(self, num_groups: int) -> None:
        """As many as the budget has left. Raises RolloutError where that is to end the run."""
        left = self.budget - self.num_drawn
        if num_groups > left and self.args.dynamic_sampling_on_exhausted == "stop":
            raise self.budget_spent()
        super().draw(min(num_groups, left))

    def _finished_before(self, group: Finished) -> None:
        self.ready.append(group)

    def decide(self, group: Finished) -> Outcome | None:
        """One that comes when there are enough is not decided on; one that goes is replaced."""
        if len(self.waiting) >= self.wanted:
            self.late(group)
            return None
        outcome = super().decide(group)
        if outcome is not Outcome.KEPT and self.missing > 0:
            self.draw(self.missing)
        return outcome

    def lose(self, group: Finished) -> None:
        """Nothing can be learned from the group; the ledger knows that already."""
        if dropped_for_good(group.samples):
            self.wanted -= 1

    def _shrink(self, usable: int) -> None:
        self.waiting.sort(key=lambda f: f.index)
        for group in self.waiting[usable:]:
            self.late(group)
        del self.waiting[usable:]

    def late(self, group: Finished) -> None:
        """It is in excess."""
        self.num_surplus += is_finished(group.samples)
        self.surplus.append(given_back(self.args, group.original, group.samples))

    def undo(self) -> None:
        """Have `finish` give back what waits and what is put aside; what the filter dropped for good stays so."""
        for group in [*self.waiting, *(group for _, group in self.aside)]:
            self.late(group)
        self.waiting.clear()
        self.aside.clear()

    async def finish(self, patience: float | None = None) -> None:
        """The end: what still runs is given back, with what came when there were enough."""
        for flight in await self.land(patience):
            if finished := flight.result():
                self.late(finished)
            else:
                self.surplus.append(restarted(flight.original))
        for group in self.ready:
            self.late(group)
        self.give_back(self.surplus, "in excess")


# It accounts for every group that it draws.
@declares(RolloutTraits(leaves_out=False, records_evaluation=True))
async def generate_rollout(
    args: Args, rollout_id: int, data_source: Any, evaluation: bool = False, *, context: RolloutContext
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Generate one rollout. Groups come back ordered by `group_index`, whatever order they finished in.

    Raises:
        RolloutError: The budget ran out and that is to stop the run, or too many samples failed in a row.
        RolloutInterrupted: `context.work.interrupt` was called; everything that was not dropped has been given back.
    """
    if evaluation:
        from slime_core.rollout.evaluate import evaluate_datasets

        return await evaluate_datasets(args, data_source, context.runner, rollout_id, record=context.eval_record)
    pool = OneRollout(args, data_source, context, rollout_id)
    try:
        complete = await context.until_interrupted(pool.fill())
    except BaseException:  # ctrl-C too: what a reward that hangs would answer is of no use any more
        await pool.finish(patience=0.0)
        raise
    if not complete:
        pool.undo()
        # Rewards still at work are worth waiting for where their samples are kept.
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
