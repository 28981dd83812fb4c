"""Decide what happens to a group: it is trained on, dropped, returned with its tokens, or regenerated.

`rollout.pool` calls `decide` for every finished group, and code that returns groups prepares them here. A fan-out is
kept only if all its siblings finished; they then wait in their group while other samples of the group continue. If a
sibling was interrupted or failed, the original sample replaces all siblings. A sibling cannot replace the original
sample (it may have another prompt), so kept siblings carry the original sample in their metadata.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from typing import TYPE_CHECKING

from slime_core.data.buffer import is_finished
from slime_core.errors import RolloutError
from slime_core.protocols import Args, EditTraits, traits_of
from slime_core.sample import FilterDecision, Group, Sample, SampleStatus, is_score
from slime_core.sample.admission import Sealed
from slime_core.sample.types import executions, mean
from slime_core.workers.call import user_code

if TYPE_CHECKING:
    from slime_core.rollout.pool import RolloutContext


FINISHED = (SampleStatus.COMPLETED, SampleStatus.TRUNCATED)
_ORIGIN = "fan_out_origin"
"""Key of `sample.metadata` of the first of several kept siblings: their original sample, as a prompt."""
GROUP_TIMEOUT = "--group-timeout"
"""Boundary named by samples that failed because their group exceeded its deadline."""


class Outcome(Enum):
    """The outcome of a group."""

    KEPT = "kept"
    """The group is trained on."""
    DROPPED = "dropped"
    """The dynamic filter dropped the group; it may still fill a rollout whose budget is spent."""
    LOST = "lost"
    """The group is useless for training: every sample, or the greedy baseline, failed."""
    AGAIN = "again"
    """The group was interrupted: it returns to the data source."""


def decide(
    context: RolloutContext, group: Group, insufficient: Callable[[], bool]
) -> tuple[Outcome, str | None, float]:
    """Decide on a group, count it and note it. Returns the outcome, a reason unless it is KEPT, the spread if DROPPED.

    The ledger records that the group is scored, and that it is LOST. The caller records other outcomes.

    Args:
        context: Filter, counters and notes.
        group: Result of `SampleRunner.run_group`, or a group that was finished before.
        insufficient: Whether there would be too few groups without this one (a filter's `keep_when_insufficient`).

    Raises:
        PluginError: The dynamic filter raised.
        RolloutError: The dynamic filter returned an invalid value.
    """
    filters = context.filters
    if any(s.status == SampleStatus.ABORTED for s in group):
        filters.count("aborted")
        return Outcome.AGAIN, "aborted", 0.0
    context.ledger.scored(group)
    scored = [s for s in group if not s.is_lost]
    if not scored:
        context.note(group)
        reason = "group_timeout" if timed_out(group) else "failed"
        filters.count(reason)
        context.ledger.dropped(group, reason)
        return Outcome.LOST, reason, 0.0
    if lack := context.runner.baseline_lack(group):
        filters.count(lack)
        if lack == "aborted":
            return Outcome.AGAIN, lack, 0.0
        context.note(group)
        context.ledger.dropped(group, lack)
        return Outcome.LOST, lack, 0.0
    context.note(group)
    decision = filters.decide(scored)
    if decision.keep:
        return Outcome.KEPT, None, 0.0
    if decision.keep_when_insufficient and insufficient():
        filters.count_kept("insufficient")
        return Outcome.KEPT, None, 0.0
    reason = decision.reason or "dropped"
    filters.count(reason)
    rank = spread(filters.args, group) if decision.spread is None else float(decision.spread)
    return Outcome.DROPPED, reason, rank


def needs_nothing(context: RolloutContext, group: Group) -> bool:
    """Return whether a drawn group was finished before (surplus, or replayed by the buffer): only `decide` is left."""
    return is_finished(group) and context.runner.baseline_lack(group) != "aborted"


def mask_older(args: Args, group: Group) -> None:
    """Mask samples that had finished when their group was interrupted (`--mask-offpolicy-in-partial-rollout`)."""
    if args.mask_offpolicy_in_partial_rollout:
        for sample in group:
            if sample.status in FINISHED and "start_rollout_id" in sample.metadata:
                sample.withhold(0, sample.response_length, "mask_offpolicy_in_partial_rollout")
                remove_if_masked(sample)


def remove_if_masked(sample: Sample) -> None:
    """Remove a finished sample if all its tokens are withheld for their age.

    As with a sample that a filter removes, its reward is left out of its group's statistics and its tokens are left out
    of every denominator.
    """
    if sample.status in FINISHED and sample.response_length and not sample.effective_response_length:
        sample.remove_sample = True


def spread(args: Args, group: Group) -> float:
    """Return the standard deviation of the executions' rewards; 0 if the rewards are not numbers."""
    rewards = [[s.get_reward_value(args) for s in e if s.reward is not None] for e in executions(group)]
    numbers = [[float(r) for r in e if is_score(r)] for e in rewards]
    means = [mean(e) for e in numbers if e]
    return statistics.pstdev(means) if means else 0.0


def timed_out(group: Group) -> bool:
    """Return whether the whole group exceeded `--group-timeout`."""
    return all(s.status == SampleStatus.FAILED and _failure(s).get("where") == GROUP_TIMEOUT for s in group)


def dropped_for_good(group: Group) -> bool:
    """Return whether the group timed out and was dropped, so that no other group is drawn in its place."""
    return timed_out(group) and all("dropped" in _failure(s) for s in group)


def _failure(sample: Sample) -> dict[str, object]:
    failure: dict[str, object] = sample.metadata.get("failure", {})
    return failure


# -- given back --------------------------------------------------------------------------------------


def keeps_finished(args: Args) -> bool:
    """Return whether finished groups that are returned are trained on later, unchanged."""
    return bool(args.partial_rollout and not args.mask_offpolicy_in_partial_rollout)


def prepare_return(args: Args, group: Group, rollout_id: int) -> Group:
    """Return the group ready to be drawn again, with its samples' tokens or as fresh prompts.

    Partial rollouts continue with their tokens and have `metadata["start_rollout_id"]`. A failed sample never
    continues, and a fan-out only if all of it is finished. An execution that does not continue becomes one prompt.
    """
    finished = is_finished(group)
    if not (keeps_finished(args) if finished else args.partial_rollout):
        return restarted(group)
    returned: Group = []
    for siblings in executions(group):
        if finished or (_is_whole(siblings) and all(s.status != SampleStatus.FAILED for s in siblings)):
            for sample in siblings:
                sample.metadata.setdefault("start_rollout_id", rollout_id)
            returned += siblings
        else:
            returned += restarted(siblings)
    return returned


def given_back(args: Args, original: Group, group: Group) -> Group:
    """Return the samples to prepare for the group's return: the generated samples if they continue, else the original.

    Args:
        args: The run's settings.
        original: Group as it was drawn.
        group: Group after generation.
    """
    goes_on = keeps_finished(args) if is_finished(group) else args.partial_rollout
    return remains(original, group) if goes_on else original


def restarted(group: Group) -> Group:
    """Return the group as prompts, one sample per execution. Samples without siblings are reset in place."""
    origins = [_origin(siblings[0]) for siblings in executions(group)]
    for sample in origins:
        sample.reset_for_retry()
    return origins


def prompts_of(group: Group) -> Group:
    """Return copies of the group's samples as prompts, one per execution; the group is not changed."""
    return restarted([copy_of(sample) for sample in group])


def remains(original: Group, group: Group) -> Group:
    """Return the samples of a generated group to return to the data source.

    Args:
        original: Group as it was drawn.
        group: Group after generation, interrupted or finished; its executions are in the order of `original`.

    Returns:
        All samples of each finished execution; for other executions the sample to continue or to start. A group whose
        executions cannot be distinguished (a generate function gave several the same `rollout_id`) is restarted, unless
        it is finished.
    """
    before, after = executions(original), executions(group)
    if len(before) != len(after):
        done = all(s.status not in (SampleStatus.ABORTED, SampleStatus.PENDING) for s in group)
        return group if done else restarted(original)
    return [sample for drawn, siblings in zip(before, after) for sample in _remains(drawn, siblings)]


def _is_whole(siblings: Group) -> bool:
    """Return whether an execution is one sample, or all of its samples are finished."""
    return len(siblings) == 1 or all(s.status in FINISHED for s in siblings)


def _remains(drawn: Group, siblings: Group) -> Group:
    first = siblings[0]
    if len(siblings) == 1:
        return siblings if first.index == drawn[0].index else drawn[:1]
    if len(drawn) == 1 and _ORIGIN not in first.metadata:
        first.metadata[_ORIGIN] = prompts_of(drawn)[0].to_dict()
    return siblings


def _origin(sample: Sample) -> Sample:
    stored = sample.metadata.get(_ORIGIN)
    return sample if stored is None else Sample.from_dict(stored)


def copy_of(sample: Sample) -> Sample:
    """Return a deep copy of a sample."""
    return Sample.from_dict(sample.to_dict())


# -- the dynamic filter ------------------------------------------------------------------------------


class FilterStage:
    """Applies the dynamic filter, if there is one, and counts why groups are dropped, or kept all the same."""

    def __init__(self, args: Args, function: Callable[..., object] | None, name: str = "") -> None:
        self.args = args
        self._function = function
        self._name = name
        self._edits = function is not None and traits_of(function, EditTraits, name).edits_samples
        self._drops: Counter[str] = Counter()
        self._kept: Counter[str] = Counter()

    def decide(self, group: Group) -> FilterDecision:
        """Return the filter's decision.

        Raises:
            PluginError: The filter raises, or changes what a sample is trained on without declaring that it edits.
            RolloutError: The filter returns an invalid value.
        """
        if self._function is None:
            return FilterDecision(keep=True)
        label = f"--dynamic-sampling-filter-path {self._name!r} (group {group[0].group_index})"
        sealed = Sealed(() if self._edits else group)
        with user_code(label):
            answer = self._function(self.args, group)
        sealed.check(label)
        if not hasattr(answer, "keep"):
            answer = answer.item() if hasattr(answer, "item") else answer  # numpy's and torch's bool
            if not isinstance(answer, bool):
                raise RolloutError(
                    f"--dynamic-sampling-filter-path {self._name!r} returned {type(answer).__name__};"
                    " expected a bool or a decision with .keep and .reason"
                )
            answer = FilterDecision(keep=answer)
        if isinstance(answer, FilterDecision):
            return replace(answer, keep=bool(answer.keep))
        insufficient = bool(getattr(answer, "keep_when_insufficient", False))
        return FilterDecision(bool(answer.keep), getattr(answer, "reason", None), insufficient)

    def count(self, reason: str) -> None:
        """Count one group that is not kept, unless `count_kept` follows, or that is given back (reason "aborted")."""
        self._drops[reason] += 1

    def count_kept(self, why: str) -> None:
        """Count one group that is trained on although the filter dropped it."""
        self._kept[why] += 1

    def take_metrics(self) -> dict[str, float]:
        """Return `rollout/dynamic_filter/drop_<reason>` and `kept_<why>` since the last call."""
        metrics = {f"rollout/dynamic_filter/drop_{reason}": float(n) for reason, n in sorted(self._drops.items())}
        metrics |= {f"rollout/dynamic_filter/kept_{why}": float(n) for why, n in sorted(self._kept.items())}
        self._drops.clear()
        self._kept.clear()
        return metrics
