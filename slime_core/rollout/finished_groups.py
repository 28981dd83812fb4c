"""What has been generated and is not trained on yet: kept groups by age, dropped ones put aside, what went and why.

`rollout.producer` adds to it and takes rollouts out of it; nothing here waits. What a reader would get wrong: the
staleness policy is applied when a rollout is about to be taken, with the weight version that will train on it. A group
may become too old while it waits, never younger.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

from slime_core.errors import RolloutError
from slime_core.protocols import Args
from slime_core.rollout import staleness
from slime_core.rollout.decisions import spread
from slime_core.rollout.flights import ASIDE, WAITING, Finished, finished_to_open, open_to_finished
from slime_core.rollout.open_groups import OpenGroup
from slime_core.rollout.schedule import RolloutContext
from slime_core.rollout.staleness import Verdict
from slime_core.types import Group

logger = logging.getLogger(__name__)
_USABLE = (Verdict.FRESH, Verdict.MASK)


class Taken(NamedTuple):
    """The groups of one rollout."""

    groups: list[Group]
    """By `group_index`."""
    decided: list[Group]
    """Those, and the ones that went since the rollout before, by `group_index`."""
    metrics: dict[str, float]


class FinishedGroups:
    """The finished groups of a producer."""

    def __init__(self, args: Args, source: Any, context: RolloutContext) -> None:
        self.args = args
        self.source = source
        self.context = context
        self.waiting: list[Finished] = []
        """Kept, and not trained on."""
        self._oldest: int | None = None
        """No version of their tokens is older."""
        self.aside: list[Finished] = []
        """Dropped groups that fill the rollout if the budget runs out, best first."""
        self._gone: list[Group] = []
        """Since the last take; kept only for the hook `slime_process_all_samples`."""
        self._reset()

    def _reset(self) -> None:
        """What is counted from one take to the next."""
        self.num_gone = 0
        """Groups that cost the rollout a part of its budget: lost, dropped, recycled."""
        self.wanted = int(self.args.rollout_batch_size)
        """Groups that make the rollout complete; fewer where the budget is spent and it may shrink."""
        self.num_recycled = self.num_stale = self.wasted_tokens = 0

    @property
    def spent(self) -> bool:
        """Whether so many groups went that the budget does not allow for the rollout any more."""
        args = self.args
        budget = max(args.dynamic_sampling_budget * args.rollout_batch_size, args.over_sampling_batch_size)
        return bool(self.num_gone + args.rollout_batch_size > budget)

    # -- coming and going ----------------------------------------------------------------------------

    def keep(self, group: Finished) -> None:
        """Let a group wait for training."""
        self._wait(group)
        self.context.ledger.buffered([group.samples])

    def _wait(self, group: Finished) -> None:
        self.waiting.append(group)
        if group.span is not None:
            self._oldest = group.span[0] if self._oldest is None else min(self._oldest, group.span[0])

    def lose(self, group: Finished) -> None:
        """Nothing can be learned from the group; the ledger knows that already."""
        self.num_gone += 1
        self._waste(group)

    def drop(self, group: Finished) -> None:
        """Put a dropped group aside while it may be needed, else tell ledger and data source that it is gone."""
        self.num_gone += 1
        self.aside.append(group)
        self.aside.sort(key=lambda f: (-spread(self.args, f.samples), f.index))
        self._trim_aside(self.wanted if self.args.dynamic_sampling_on_exhausted == "keep" else 0)

    def _trim_aside(self, limit: int) -> None:
        observe: Callable[..., None] | None = getattr(self.source, "observe", None)
        for group in self.aside[limit:]:
            if observe is not None:
                observe([group.samples], False)
            self.context.ledger.dropped(group.samples, group.reason or "dropped")
            self._waste(group)
        del self.aside[limit:]

    def _waste(self, group: Finished) -> None:
        self.wasted_tokens += staleness.num_sampled(group.samples)
        if self.context.runner.hooks.wants_all_groups:
            self._gone.append(group.samples)

    def cull(self, version: int) -> None:
        """Recycle or drop what waits and is too old for `version` to train on."""
        limit, oldest = self.args.max_staleness, self._oldest
        if limit is None or oldest is None or version - oldest <= limit:
            return
        waiting, self.waiting, self._oldest = self.waiting, [], None
        for group in waiting:
            verdict = self._verdict(group, version)
            if verdict in _USABLE:
                self._wait(group)
                continue
            self.num_gone += 1
            if verdict is Verdict.RECYCLE:
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

    def _verdict(self, group: Finished, version: int) -> Verdict:
        return staleness.judge_span(self.args, group.span, group.retries, version)

    # -- a rollout -----------------------------------------------------------------------------------

    def settle(self, rollout_id: int, version: int) -> None:
        """Make do with what there is: dropped groups, or fewer. Raises RolloutError where that is not wanted."""
        args = self.args
        if args.dynamic_sampling_on_exhausted == "keep":
            usable = [f for f in self.aside if self._verdict(f, version) in _USABLE]
            for group in usable[: max(self.wanted - len(self.waiting), 0)]:
                self.aside.remove(group)
                self._wait(group)
                self.context.filters.count_kept("exhausted")
        if len(self.waiting) < self.wanted and args.dynamic_sampling_on_exhausted != "shrink":
            raise self._exhausted(rollout_id)
        if len(self.waiting) >= self.wanted:
            return
        per_step = args.global_batch_size // args.n_samples_per_prompt
        self.wanted = len(self.waiting) // per_step * per_step
        if self.wanted == 0:
            raise self._exhausted(rollout_id)
        why = f"the budget is spent, so it has {self.wanted} groups instead of {args.rollout_batch_size}"
        self.context.ledger.short(rollout_id, why)
        logger.warning("rollout %d: %s", rollout_id, why)

    def _exhausted(self, rollout_id: int) -> RolloutError:
        return RolloutError(
            f"rollout {rollout_id}: {self.num_gone} groups went since the rollout before, and only"
            f" {len(self.waiting)} of {self.args.rollout_batch_size} wait for training (not kept:"
            f" {self.context.filters.take_metrics()}); raise --dynamic-sampling-budget (now"
            f" {self.args.dynamic_sampling_budget}), or see to why groups are dropped, fail, come back aborted or"
            " become too old; --dynamic-sampling-on-exhausted names other outcomes than this"
        )

    def take(self, version: int) -> Taken:
        """The oldest groups that wait, as a rollout that `version` trains on; counting begins anew."""
        args = self.args
        self.waiting.sort(key=lambda f: f.turn)
        chosen, self.waiting = self.waiting[: self.wanted], self.waiting[self.wanted :]
        chosen.sort(key=lambda f: f.index)
        masked = 0
        if args.max_staleness is not None and args.staleness_policy == "mask":
            masked = sum(staleness.mask_old_tokens(f.samples, version, args.max_staleness, f.began) for f in chosen)
        self._trim_aside(0)
        groups = [f.samples for f in chosen]
        metrics = {
            **self.context.filters.take_metrics(),
            **staleness.staleness_metrics([(f.samples, f.began) for f in chosen], version),
            "rollout/staleness/recycled_groups": float(self.num_recycled),
            "rollout/staleness/dropped_groups": float(self.num_stale),
            "rollout/staleness/masked_tokens": float(masked),
            "rollout/wasted_tokens": float(self.wasted_tokens),
            "rollout/queue/waiting_groups": float(len(self.waiting)),
        }
        decided = sorted([*groups, *self._gone], key=lambda g: g[0].group_index or 0)
        self._gone = []
        self._reset()
        return Taken(groups, decided, metrics)

    def restore(self, group: OpenGroup) -> None:
        """Inverse of `open_groups`, for one."""
        if group.details["state"] == WAITING:
            self._wait(open_to_finished(group))
        else:
            self.aside.append(open_to_finished(group))

    def open_groups(self) -> list[OpenGroup]:
        """All of them, for a commit."""
        waiting = sorted(self.waiting, key=lambda f: f.turn)
        return [*(finished_to_open(f, WAITING) for f in waiting), *(finished_to_open(f, ASIDE) for f in self.aside)]
