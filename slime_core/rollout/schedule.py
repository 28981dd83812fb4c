"""Stage 2: prompts -> `rollout_batch_size` generated, scored and kept groups.

This is the built-in rollout function (kind `rollouts`, name `generate`): a pool (`rollout.pool`) for one rollout. No
drawn prompt is lost: it is accepted, dropped by the filter with a counted reason, or given back, by a partial rollout
with its tokens, and finished ones with their rewards. A finished group that a partial rollout had in excess was sampled
by older weights when its turn comes, as its weight versions say; with `--mask-offpolicy-in-partial-rollout` it is
regenerated instead.
"""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from slime_core.data.ledger import Ledger
from slime_core.errors import RolloutInterrupted
from slime_core.protocols import Args, RolloutTraits, declares
from slime_core.rollout.evaluations import Interruptible
from slime_core.rollout.fate import keeps_finished
from slime_core.rollout.filters import FilterStage
from slime_core.rollout.generate import SampleRunner
from slime_core.rollout.pool import Pool
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


async def _fill(pool: Pool) -> None:
    """Draw and decide until the rollout is complete, or as complete as it gets."""
    await pool.run()
    if over := pool.args.rollout_batch_size - pool.finished.wanted:
        pool.finished.trim(f"{over} groups were over --group-timeout")
    pool.finished.forget(0)


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
    pool = Pool(args, data_source, context, rollout_id)
    try:
        complete = await context.until_interrupted(_fill(pool))
    except BaseException:  # ctrl-C too: what a reward that hangs would answer is of no use any more
        await pool.finish(patience=0.0)
        raise
    if not complete:
        pool.finished.undo()
        # Rewards still at work are worth waiting for where their samples are kept.
        await pool.finish(patience=None if args.partial_rollout else 0.0)
        context.filters.take_metrics()
        raise RolloutInterrupted
    await pool.finish()
    metrics = {
        **context.filters.take_metrics(),
        "rollout/groups_drawn": float(pool.finished.num_drawn),
        "rollout/groups_given_back": float(pool.num_returned),
        "rollout/surplus_groups": float(pool.finished.num_surplus),
        "rollout/surplus_groups_kept": float(pool.finished.num_surplus if keeps_finished(args) else 0),
    }
    return RolloutFnTrainOutput([f.samples for f in sorted(pool.finished.waiting, key=lambda f: f.index)], metrics)
