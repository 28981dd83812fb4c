"""Compute the age of a sample's tokens at training time, and apply `--max-staleness` to old groups.

`rollout.pool` calls `judge` when a group is due for training. Ages are in weight versions: the version that trains
minus the version that sampled. Only tokens that would be trained on count: tool output has no age, and masked tokens
and removed samples do no harm. A group is as old as its oldest token, since with in-flight updates one response has
tokens of several versions.

The policies for a group over the limit:

- recycle: its prompt is regenerated, at most `--staleness-max-retries` times; then the group is dropped.
- drop: the group is dropped; another prompt takes its place.
- mask: old tokens get loss mask 0, newer tokens are trained on, and rewards count in the group's statistics as usual. A
  sample without trained tokens is removed (`remove_sample`), also from the statistics, as with a user's sample filter.
  A group without trained tokens is dropped.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from enum import Enum
from itertools import groupby

from slime_core.protocols import Args
from slime_core.rollout.fate import remove_if_masked, restarted
from slime_core.sample import NOT_SAMPLED, Group, Sample
from slime_core.sample.types import executions

_RETRIES = "stale_retries"
"""Entry of `sample.metadata`: number of regenerations because of age. The entry survives buffers and resume."""
_HISTOGRAM_END = 8
"""Lowest age of the last bin, `hist_8_or_more`."""


class Verdict(Enum):
    """The staleness verdict on a group that is due for training."""

    FRESH = "fresh"
    RECYCLE = "recycle"
    DROP = "drop"
    MASK = "mask"

    @property
    def trains(self) -> bool:
        """Return True if the group is trained on, perhaps with masked tokens."""
        return self in (Verdict.FRESH, Verdict.MASK)


def sampled_versions(sample: Sample, unknown: int) -> list[int]:
    """Return the version of each token to be trained on; `unknown` if no versions were recorded.

    If a sample only has `weight_versions` of its calls, every token gets the oldest of them.
    """
    if sample.is_removed:
        return []
    mask = sample.loss_mask if sample.loss_mask is not None else [1] * sample.response_length
    if sample.token_weight_versions:
        return [
            v for v, trained in zip(sample.token_weight_versions, mask, strict=True) if trained and v != NOT_SAMPLED
        ]
    return [sample.oldest_version(unknown)] * sum(map(bool, mask))


def sample_age(sample: Sample, version: int, unknown: int) -> int | None:
    """Return the age in versions of the oldest token that `version` would train on; None without such tokens."""
    versions = sampled_versions(sample, unknown)
    return version - min(versions) if versions else None


def version_span(group: Group, unknown: int) -> tuple[int, int] | None:
    """Return the oldest and newest version of the group's trained tokens; None without such tokens."""
    spans = [(min(versions), max(versions)) for s in group if (versions := sampled_versions(s, unknown))]
    return (min(old for old, _ in spans), max(new for _, new in spans)) if spans else None


def num_sampled(group: Iterable[Sample]) -> int:
    """Return the number of tokens that a policy sampled, which are wasted if the group is dropped."""
    counts = (
        sum(v != NOT_SAMPLED for v in s.token_weight_versions) if s.token_weight_versions else s.response_length
        for s in group
    )
    return sum(counts)


def judge(args: Args, span: tuple[int, int] | None, num_retries: int, version: int) -> Verdict:
    """Return the verdict of `--max-staleness` and `--staleness-policy` on a group for training at `version`.

    Args:
        args: The run's settings.
        span: The group's `version_span`.
        num_retries: The group's `retries`.
        version: The version that will train on the group.
    """
    limit = args.max_staleness
    if limit is None or span is None or version - span[0] <= limit:
        return Verdict.FRESH
    if args.staleness_policy == "mask":
        return Verdict.MASK if version - span[1] <= limit else Verdict.DROP
    if args.staleness_policy == "recycle" and num_retries < args.staleness_max_retries:
        return Verdict.RECYCLE
    return Verdict.DROP


def retries(group: Group) -> int:
    """Return the number of times that the group was regenerated because of its age."""
    return max(int(s.metadata.get(_RETRIES, 0)) for s in group)


def recycle(group: Group) -> Group:
    """Return the group as fresh prompts with an increased retry count."""
    count, prompts = retries(group) + 1, restarted(group)
    for sample in prompts:
        sample.metadata[_RETRIES] = count
    return prompts


def mask_old_tokens(group: Group, version: int, limit: int, unknown: int) -> int:
    """Set the loss mask to 0 on tokens over the limit; return their number. See the module's docstring for details."""
    masked = 0
    for sample in group:
        versions = sampled_versions(sample, unknown)
        if not versions or version - min(versions) <= limit:
            continue
        before = sample.effective_response_length
        per_token = sample.token_weight_versions or [versions[0]] * sample.response_length
        start = 0
        for old, run in groupby(per_token, lambda v: v != NOT_SAMPLED and version - v > limit):
            end = start + sum(1 for _ in run)
            if old:
                sample.withhold(start, end, "max_staleness")
            start = end
        masked += before - sample.effective_response_length
        remove_if_masked(sample)
    return masked


def staleness_metrics(groups: Iterable[tuple[Group, int]], version: int) -> dict[str, float]:
    """Return `rollout/staleness/{mean,max}` over the executions' ages, and the number of executions of each age.

    An execution is as old as its oldest sample; without fan-out it is the sample.

    Args:
        groups: The groups for training, each with its `unknown` version (see `sampled_versions`).
        version: The version that will train on them.
    """
    known = (
        [age for s in siblings if (age := sample_age(s, version, unknown)) is not None]
        for group, unknown in groups
        for siblings in executions(group)
    )
    ages = [max(siblings) for siblings in known if siblings]
    if not ages:
        return {}
    metrics = {"rollout/staleness/mean": statistics.fmean(ages), "rollout/staleness/max": float(max(ages))}
    return metrics | histogram(ages)


def histogram(ages: Sequence[int]) -> dict[str, float]:
    """Return `rollout/staleness/hist_<age>` -> executions, without gaps up to the oldest."""
    bins = Counter(min(max(age, 0), _HISTOGRAM_END) for age in ages)
    names = {age: f"hist_{age}" if age < _HISTOGRAM_END else f"hist_{age}_or_more" for age in range(max(bins) + 1)}
    return {f"rollout/staleness/{name}": float(bins[age]) for age, name in names.items()}
