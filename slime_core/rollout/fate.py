"""What becomes of a group: trained on, dropped, given back with what it has, or regenerated.

`rollout.pool` asks `decide` about every finished group, and whoever hands groups back prepares them here. A fan-out is
whole or it is nothing. Its siblings are kept when all of them are finished, and wait in their group beside samples that
go on; when one was interrupted or has failed, the sample that they were made of takes their place. A sibling is no such
sample (it may have another prompt), so kept ones carry theirs along.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, Any

from slime_core.data.buffer import is_finished
from slime_core.fan_out import executions, mean
from slime_core.protocols import Args
from slime_core.sample import is_score
from slime_core.types import Group, Sample, SampleStatus

if TYPE_CHECKING:
    from slime_core.rollout.schedule import RolloutContext

FINISHED = (SampleStatus.COMPLETED, SampleStatus.TRUNCATED)
ORIGIN = "fan_out_origin"
"""Entry of `sample.metadata` of the first of several kept siblings: the sample that they were made of, as a prompt."""
GROUP_TIMEOUT = "--group-timeout"
"""The boundary named by samples that failed since their group was over its deadline."""


class Outcome(Enum):
    """Of one group."""

    KEPT = "kept"
    """Trained on."""
    DROPPED = "dropped"
    """By the dynamic filter; may fill a rollout whose budget is spent."""
    LOST = "lost"
    """Nothing can be learned from it: every sample, or the greedy baseline, failed."""
    AGAIN = "again"
    """Interrupted: goes back to the data source."""


def decide(context: RolloutContext, group: Group, insufficient: Callable[[], bool]) -> tuple[Outcome, str | None]:
    """Decide on one group, count it and note it; returns the outcome and the reason of any but KEPT.

    The ledger learns that the group is scored, and what is LOST; what becomes of other groups is the caller's.

    Args:
        context: Filter, counters and notes.
        group: What `SampleRunner.run_group` returned, or a group that was finished before.
        insufficient: Whether there would be too few groups without this one (a filter's `keep_when_insufficient`).

    Raises:
        PluginError: The dynamic filter raised.
        RolloutError: It answered nonsense.
    """
    filters = context.filters
    if any(s.status == SampleStatus.ABORTED for s in group):
        filters.count("aborted")
        return Outcome.AGAIN, "aborted"
    context.ledger.scored(group)
    scored = [s for s in group if not s.is_lost]
    if not scored:
        context.note(group)
        reason = "group_timeout" if timed_out(group) else "failed"
        filters.count(reason)
        context.ledger.dropped(group, reason)
        return Outcome.LOST, reason
    if lack := context.runner.baseline_lack(group):
        filters.count(lack)
        if lack == "aborted":
            return Outcome.AGAIN, lack
        context.note(group)
        context.ledger.dropped(group, lack)
        return Outcome.LOST, lack
    context.note(group)
    decision = filters.decide(scored)
    if decision.keep:
        return Outcome.KEPT, None
    if decision.keep_when_insufficient and insufficient():
        filters.count_kept("insufficient")
        return Outcome.KEPT, None
    reason = decision.reason or "dropped"
    filters.count(reason)
    return Outcome.DROPPED, reason


def needs_nothing(context: RolloutContext, group: Group) -> bool:
    """Whether a drawn group was finished before (in excess, or replayed by the buffer) and only waits for `decide`."""
    return is_finished(group) and context.runner.baseline_lack(group) != "aborted"


def mask_older(args: Args, group: Group) -> None:
    """`--mask-offpolicy-in-partial-rollout` for samples that were finished when their group was interrupted."""
    if args.mask_offpolicy_in_partial_rollout:
        for sample in group:
            if sample.status in FINISHED and "start_rollout_id" in sample.metadata:
                sample.withhold(0, sample.response_length, "mask_offpolicy_in_partial_rollout")
                remove_if_masked(sample)


def remove_if_masked(sample: Sample) -> None:
    """The one rule for a finished sample whose tokens are withheld for their age: with none left it counts nowhere.

    Its reward is outside its group's statistics and its tokens outside every denominator, as where a filter removes it.
    """
    if sample.status in FINISHED and sample.response_length and not sample.effective_response_length:
        sample.remove_sample = True


def spread(args: Args, group: Group) -> float:
    """Standard deviation of the executions' rewards: how much a group could teach; 0 where they are no numbers."""
    rewards = [[s.get_reward_value(args) for s in e if s.reward is not None] for e in executions(group)]
    numbers = [[float(r) for r in e if is_score(r)] for e in rewards]
    means = [mean(e) for e in numbers if e]
    return statistics.pstdev(means) if means else 0.0


def timed_out(group: Group) -> bool:
    """Whether the group as a whole was over `--group-timeout`."""
    return all(s.status == SampleStatus.FAILED and _failure(s).get("where") == GROUP_TIMEOUT for s in group)


def dropped_for_good(group: Group) -> bool:
    """Whether nothing is to be drawn in its place."""
    return timed_out(group) and all("dropped" in _failure(s) for s in group)


def _failure(sample: Any) -> dict[str, Any]:
    failure: dict[str, Any] = sample.metadata.get("failure", {})
    return failure


# -- given back --------------------------------------------------------------------------------------


def keeps_finished(args: Args) -> bool:
    """Whether finished groups that are given back are trained on later, as they are."""
    return bool(args.partial_rollout and not args.mask_offpolicy_in_partial_rollout)


def prepare_return(args: Args, group: Group, rollout_id: int) -> Group:
    """The group ready to be drawn again: with what its samples have, or as fresh prompts.

    Partial rollouts go on with their tokens, which `metadata["start_rollout_id"]` tells; a failed sample never does,
    and of a fan-out only one that is finished whole. What does not go on is one prompt per execution.
    """
    finished = is_finished(group)
    if not (keeps_finished(args) if finished else args.partial_rollout):
        return restarted(group)
    returned: Group = []
    for siblings in executions(group):
        if finished or (is_whole(siblings) and all(s.status != SampleStatus.FAILED for s in siblings)):
            for sample in siblings:
                sample.metadata.setdefault("start_rollout_id", rollout_id)
            returned += siblings
        else:
            returned += restarted(siblings)
    return returned


def given_back(args: Args, original: Group, group: Group) -> Group:
    """What of a group is to be prepared for its return: what it has become, where that goes on.

    Args:
        args: The run's settings.
        original: As it was drawn.
        group: As it came back.
    """
    goes_on = keeps_finished(args) if is_finished(group) else args.partial_rollout
    return remains(original, group) if goes_on else original


def restarted(group: Group) -> Group:
    """The group as prompts, one sample per execution. Samples without siblings are reset in place."""
    origins = [_origin(siblings[0]) for siblings in executions(group)]
    for sample in origins:
        sample.reset_for_retry()
    return origins


def prompts_of(group: Group) -> Group:
    """The same of copies; the group stays as it is."""
    return restarted([copy_of(sample) for sample in group])


def remains(original: Group, group: Group) -> Group:
    """What a group that was generated is given back as.

    Args:
        original: As it was drawn.
        group: What has become of it, interrupted or finished: an execution for every one of `original`, in order.

    Returns:
        Finished executions whole; others as the sample that goes on, or is to. A group whose executions cannot be told
        apart (a generate function gave several the same `rollout_id`) is started over, unless it is finished.
    """
    before, after = executions(original), executions(group)
    if len(before) != len(after):
        done = all(s.status not in (SampleStatus.ABORTED, SampleStatus.PENDING) for s in group)
        return group if done else restarted(original)
    return [sample for drawn, siblings in zip(before, after) for sample in _remains(drawn, siblings)]


def is_whole(siblings: Group) -> bool:
    """Whether an execution is one sample, or all of its samples are finished."""
    return len(siblings) == 1 or all(s.status in FINISHED for s in siblings)


def _remains(drawn: Group, siblings: Group) -> Group:
    first = siblings[0]
    if len(siblings) == 1:
        return siblings if first.index == drawn[0].index else drawn[:1]
    if len(drawn) == 1 and ORIGIN not in first.metadata:
        first.metadata[ORIGIN] = prompts_of(drawn)[0].to_dict()
    return siblings


def _origin(sample: Sample) -> Sample:
    stored = sample.metadata.get(ORIGIN)
    return sample if stored is None else Sample.from_dict(stored)


def copy_of(sample: Sample) -> Sample:
    """Whose values are its own."""
    return Sample.from_dict(sample.to_dict())
