"""How old the tokens of a sample are when it is trained on, and what `--max-staleness` makes of old ones.

`rollout.pool` asks when a group's turn to be trained on comes. Ages are in weight versions: the version that trains
minus the version that sampled. Only tokens that would be trained on count: tool output has no age, and masked tokens
and removed samples cannot hurt. A group is as old as its oldest token, since under updates in flight one response has
tokens of several versions.

What the policies do with a group over the limit:

- recycle: its prompt is regenerated, at most `--staleness-max-retries` times; then it is dropped.
- drop: it is dropped; another prompt takes its place.
- mask: its old tokens get loss mask 0, its young ones train, and its rewards count in the group's statistics as ever. A
  sample of which nothing is left is removed (`remove_sample`), which takes it out of those as well, as it does for
  a user's sample filter. A group of which nothing is left is dropped.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from enum import Enum
from itertools import groupby

from slime_core.fan_out import executions
from slime_core.protocols import Args
from slime_core.rollout.fate import remove_if_masked, restarted
from slime_core.types import NOT_SAMPLED, Group, Sample

RETRIES = "stale_retries"
"""Entry of `sample.metadata`: how often the group was regenerated for its age. It survives buffers and resume."""
HISTOGRAM_END = 8
"""Ages from here on share the last bin, `hist_8_or_more`."""


class Verdict(Enum):
    """On a group that is about to be trained on."""

    FRESH = "fresh"
    RECYCLE = "recycle"
    DROP = "drop"
    MASK = "mask"

    @property
    def trains(self) -> bool:
        """It is trained on, if with fewer tokens."""
        return self in (Verdict.FRESH, Verdict.MASK)


def sampled_versions(sample: Sample, unknown: int) -> list[int]:
    """Version of each token to be trained on; `unknown` stands in where nobody recorded versions.

    A sample with `weight_versions` of its calls only is as old as the oldest of them.
    """
    if sample.is_removed:
        return []
    mask = sample.loss_mask if sample.loss_mask is not None else [1] * sample.response_length
    if sample.token_weight_versions:
        return [
            v for v, trained in zip(sample.token_weight_versions, mask, strict=True) if trained and v != NOT_SAMPLED
        ]
    oldest = min((int(v) for v in sample.weight_versions if v.isdecimal()), default=unknown)
    return [oldest] * sum(map(bool, mask))


def sample_age(sample: Sample, version: int, unknown: int) -> int | None:
    """Of the oldest token that `version` would train on; None when there is none."""
    versions = sampled_versions(sample, unknown)
    return version - min(versions) if versions else None


def version_span(group: Group, unknown: int) -> tuple[int, int] | None:
    """Oldest and newest version among the group's tokens; None when none of them is trained on."""
    spans = [(min(versions), max(versions)) for s in group if (versions := sampled_versions(s, unknown))]
    return (min(old for old, _ in spans), max(new for _, new in spans)) if spans else None


def num_sampled(group: Iterable[Sample]) -> int:
    """Tokens that a policy sampled: what is wasted when the group is."""
    counts = (
        sum(v != NOT_SAMPLED for v in s.token_weight_versions) if s.token_weight_versions else s.response_length
        for s in group
    )
    return sum(counts)


def judge(args: Args, span: tuple[int, int] | None, num_retries: int, version: int) -> Verdict:
    """What `--max-staleness` and `--staleness-policy` make of a group that `version` is to train on.

    Args:
        args: The run's settings.
        span: The group's `version_span`.
        num_retries: Its `retries`.
        version: That will train.
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
    """How often the group has been regenerated for its age."""
    return max(int(s.metadata.get(RETRIES, 0)) for s in group)


def recycle(group: Group) -> Group:
    """The group as fresh prompts again, which count that."""
    count, prompts = retries(group) + 1, restarted(group)
    for sample in prompts:
        sample.metadata[RETRIES] = count
    return prompts


def mask_old_tokens(group: Group, version: int, limit: int, unknown: int) -> int:
    """Set the loss mask to 0 on tokens over the limit; how many that were. See the module's text for the rest."""
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
    """`rollout/staleness/{mean,max}` over the executions' ages, and how many executions there are of each age.

    An execution is as old as the oldest of its samples: without fan-out it is the sample.

    Args:
        groups: What goes to training, each with its `unknown` version (see `sampled_versions`).
        version: That will train.
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
    """`rollout/staleness/hist_<age>` -> executions, without gaps up to the oldest."""
    bins = Counter(min(max(age, 0), HISTOGRAM_END) for age in ages)
    names = {age: f"hist_{age}" if age < HISTOGRAM_END else f"hist_{age}_or_more" for age in range(max(bins) + 1)}
    return {f"rollout/staleness/{name}": float(bins[age]) for age, name in names.items()}
