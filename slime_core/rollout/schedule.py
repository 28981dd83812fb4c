"""Stage 2: prompts -> `rollout_batch_size` generated, scored and kept groups.

This is the built-in rollout function (kind `rollouts`, name `generate`): a pool (`rollout.pool`) for one rollout. No
drawn prompt is lost: it is accepted, dropped by the filter with a counted reason, or given back. A partial rollout
gives back groups with their tokens, and finished groups with their rewards. Such a finished surplus group is trained on
later, although older weights sampled it, as its weight versions show. With `--mask-offpolicy-in-partial-rollout` the
group is regenerated instead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from slime_core.data.buffer import is_finished
from slime_core.data.ledger import Ledger
from slime_core.errors import RolloutInterrupted, rollout_name
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

    async def until_interrupted(self, work: Coroutine[Any, Any, None]) -> bool:
        """Run `work`; return False if the end of the run cancelled it."""
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
        """Drawn groups that an earlier rollout finished and that wait for a decision."""
        self.surplus: list[Group] = []
        """Surplus groups to give back."""
        self.num_surplus = 0
        """Number of finished surplus groups."""
        super().__init__(args, source, context, rollout_id)

    @property
    def held(self) -> int:
        """Number of groups that wait, or may come to wait, for training."""
        return super().held + len(self.ready)

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

    def _finished_before(self, group: Finished) -> None:
        self.ready.append(group)

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
    args: Args, rollout_id: int, data_source: Any, evaluation: bool = False, *, context: RolloutContext
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Generate a rollout. Groups are returned in order of `group_index`, regardless of the order of finishing.

    Raises:
        RolloutError: The budget ran out and the settings stop the run then, or too many samples failed in a row.
        RolloutInterrupted: `context.work.interrupt` was called; all groups that were not dropped have been given back.
    """
    if evaluation:
        from slime_core.rollout.evaluate import evaluate_datasets

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
