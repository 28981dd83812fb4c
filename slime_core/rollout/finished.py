"""Groups that have been decided on: those that wait for training, those put aside, those in excess; what went and why.

`rollout.pool` adds to it, and rollouts are made of it; nothing here waits. The staleness policy is applied when a
rollout is about to be taken, with the weight version that will train on it. A group may become too old while it waits,
never younger.
"""

from __future__ import annotations

import logging
from bisect import insort
from collections.abc import Callable
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from slime_core.data.buffer import is_finished
from slime_core.errors import RolloutError
from slime_core.protocols import Args
from slime_core.rollout import staleness
from slime_core.rollout.fate import dropped_for_good, given_back, spread
from slime_core.rollout.flights import Finished
from slime_core.types import Group

if TYPE_CHECKING:
    from slime_core.rollout.schedule import RolloutContext

logger = logging.getLogger(__name__)


class FinishedGroups:
    """The finished groups of a pool, and what is counted for the rollout that is made of them."""

    def __init__(self, args: Args, source: Any, context: RolloutContext, version: Callable[[], int] | None) -> None:
        """`version` of an endless pool answers the newest weight version; None: they are of one rollout."""
        self.args, self.source, self.context = args, source, context
        self.endless = version is not None
        self.version = version or (lambda: 0)
        self.waiting: list[Finished] = []
        """Kept, and not trained on."""
        self.aside: list[tuple[tuple[float, int], Finished]] = []
        """Dropped groups that fill the rollout if the budget runs out, best first, each with what orders it."""
        self.surplus: list[Group] = []
        """In excess of one rollout, to be given back."""
        self.num_surplus = 0
        """How many of those were finished."""
        self.gone: list[Group] = []
        """Since the last take; kept only for the hook `slime_process_all_samples`."""
        self.taken_by: tuple[int, int] = (0, 0)
        """A weight version, and how many groups were taken for training by it."""
        self._oldest: int | None = None
        """No version of the tokens that wait is older."""
        self.begin(0)

    def begin(self, rollout_id: int) -> None:
        """Count anew, for the next rollout."""
        self.rollout_id = rollout_id
        self.wanted = int(self.args.rollout_batch_size)
        """Groups that make it complete; fewer where `--group-timeout-policy drop` or a spent budget says so."""
        self.num_drawn = self.num_gone = 0
        self.num_recycled = self.num_stale = self.wasted_tokens = 0

    # -- coming and going ----------------------------------------------------------------------------

    def keep(self, group: Finished) -> None:
        """It waits."""
        self.waiting.append(group)
        if group.span is not None:
            self._oldest = group.span[0] if self._oldest is None else min(self._oldest, group.span[0])

    def lose(self, group: Finished) -> None:
        """Nothing can be learned from the group; the ledger knows that already."""
        if self.endless:
            self.num_gone += 1
            self._waste(group)
        elif dropped_for_good(group.samples):
            self.wanted -= 1

    def _waste(self, group: Finished) -> None:
        self.wasted_tokens += staleness.num_sampled(group.samples)
        if self.endless and self.context.runner.hooks.wants_all_groups:
            self.gone.append(group.samples)

    def drop(self, group: Finished) -> None:
        """By the filter: put aside while it may be needed, else gone."""
        self.num_gone += 1
        self.put_aside(group)
        limit = self.wanted - (0 if self.endless else len(self.waiting))
        self.forget(limit if self.args.dynamic_sampling_on_exhausted == "keep" else 0)

    def put_aside(self, group: Finished) -> None:
        """A dropped group stays while it may be needed."""
        insort(self.aside, ((-spread(self.args, group.samples), group.index), group), key=itemgetter(0))

    def forget(self, limit: int) -> None:
        """Keep the best `limit` of the groups put aside; ledger and data source learn that the others are gone."""
        observe: Callable[..., None] | None = getattr(self.source, "observe", None)
        for _, group in self.aside[limit:]:
            self.context.ledger.dropped(group.samples, group.reason or "dropped")
            if observe is not None:
                observe([group.samples], False)
            self._waste(group)
        del self.aside[limit:]

    def late(self, group: Finished) -> None:
        """One that came when there were enough for one rollout."""
        self.num_surplus += is_finished(group.samples)
        self.surplus.append(given_back(self.args, group.original, group.samples))

    def undo(self) -> None:
        """Have `finish` give back what waits and what is put aside; what the filter dropped for good stays so."""
        for group in [*self.waiting, *(group for _, group in self.aside)]:
            self.late(group)
        self.waiting.clear()
        self.aside.clear()

    # -- a spent budget ------------------------------------------------------------------------------

    @property
    def budget(self) -> int:
        """Groups that may be drawn, or go, for one rollout."""
        args = self.args
        return max(args.dynamic_sampling_budget * args.rollout_batch_size, args.over_sampling_batch_size)

    def settle(self) -> None:
        """The budget is spent: `--dynamic-sampling-on-exhausted` says what becomes of the rollout.

        Raises:
            RolloutError: It is to end the run, or there is not one optimizer step's worth of groups.
        """
        if self.args.dynamic_sampling_on_exhausted == "keep":
            usable = [entry for entry in self.aside if self.verdict(entry[1]).trains]
            for entry in usable[: max(self.wanted - len(self.waiting), 0)]:
                self.aside.remove(entry)
                self.keep(entry[1])
                self.context.filters.count_kept("exhausted")
        if len(self.waiting) < self.wanted:
            if self.args.dynamic_sampling_on_exhausted != "shrink":
                raise self.exhausted()
            self.trim("the budget is spent")

    def verdict(self, group: Finished) -> staleness.Verdict:
        """Whether a group is too old for the newest weights to train on."""
        return staleness.judge(self.args, group.span, group.retries, self.version())

    def trim(self, why: str) -> None:
        """Go on with as many groups as whole optimizer steps take; the others are in excess, or wait."""
        args = self.args
        per_step = args.global_batch_size // args.n_samples_per_prompt
        usable = len(self.waiting) // per_step * per_step
        if usable == 0:
            raise self.exhausted()
        so = f"{why}, so it has {usable} groups instead of {args.rollout_batch_size}"
        if self.endless:
            self.wanted = usable
        else:
            self.waiting.sort(key=lambda f: f.index)
            for group in self.waiting[usable:]:
                self.late(group)
            del self.waiting[usable:]
        self.context.ledger.short(self.rollout_id, so if self.endless else why)
        logger.warning("rollout %d: %s", self.rollout_id, so)

    def exhausted(self) -> RolloutError:
        """The error of a spent budget."""
        args, waiting = self.args, f"{len(self.waiting)} of {self.args.rollout_batch_size}"
        if self.endless:
            counted = f"{self.num_gone} groups went since the rollout before, and only {waiting} wait for training"
            causes = "fail, come back aborted or become too old"
        else:
            counted, causes = f"{self.num_drawn} groups drawn and only {waiting} kept", "fail or come back aborted"
        return RolloutError(
            f"rollout {self.rollout_id}: {counted} (not kept: {self.context.filters.take_metrics()}); raise"
            f" --dynamic-sampling-budget (now {args.dynamic_sampling_budget}), or see to why groups are dropped,"
            f" {causes}; --dynamic-sampling-on-exhausted names other outcomes than this"
        )

    # -- taking out of an endless pool ---------------------------------------------------------------

    def cull(self) -> None:
        """Recycle or drop what waits and is too old for the newest weights to train on."""
        limit = self.args.max_staleness
        if limit is None or self._oldest is None or self.version() - self._oldest <= limit:
            return
        waiting, self.waiting, self._oldest = self.waiting, [], None
        for group in waiting:
            verdict = self.verdict(group)
            if verdict.trains:
                self.keep(group)
                continue
            self.num_gone += 1
            if verdict is staleness.Verdict.RECYCLE:
                self.num_recycled += 1
                self.wasted_tokens += staleness.num_sampled(group.samples)
                again = staleness.recycle(group.original)
                self.context.ledger.recycled(again, "stale")
                self.source.add_samples([again])
                continue
            self.num_stale += 1
            self.context.filters.count("stale")
            self.context.ledger.dropped(group.samples, "stale")
            self._waste(group)

    def take_oldest(self) -> tuple[list[Group], dict[str, float]]:
        """The oldest groups that wait, as the rollout that the newest weights train on, by `group_index`; metrics."""
        args, version = self.args, self.version()
        self.waiting.sort(key=lambda f: f.turn)
        chosen, self.waiting = self.waiting[: self.wanted], self.waiting[self.wanted :]
        chosen.sort(key=lambda f: f.index)
        masked = 0
        if args.max_staleness is not None and args.staleness_policy == "mask":
            masked = sum(staleness.mask_old_tokens(f.samples, version, args.max_staleness, f.began) for f in chosen)
        self.forget(0)
        taken_by, taken = self.taken_by
        self.taken_by = version, len(chosen) + (taken if taken_by == version else 0)
        return [f.samples for f in chosen], {
            **self.context.filters.take_metrics(),
            **staleness.staleness_metrics([(f.samples, f.began) for f in chosen], version),
            "rollout/staleness/recycled_groups": float(self.num_recycled),
            "rollout/staleness/dropped_groups": float(self.num_stale),
            "rollout/staleness/masked_tokens": float(masked),
            "rollout/wasted_tokens": float(self.wasted_tokens),
            "rollout/queue/waiting_groups": float(len(self.waiting)),
            "rollout/groups_drawn": float(self.num_drawn),
        }
