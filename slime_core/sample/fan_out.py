"""Samples -> executions: the samples of one call of a generate function count once (fan-out).

Filters, buffers, statistics and metrics call `executions` or `execution_rewards` before they count or average. Standard
library only. Siblings are identified by `rollout_id` alone. Each sample without a `rollout_id` is an execution of its
own; two samples of the run with the same `rollout_id` are siblings, at any position.

Example, a group of two executions::

    sample            A   B   C        executions        [[A, B], [C]]
    rollout_id        7   7   None     shares            [1/2, 1/2, 1]
    reward            1   0   1        execution_rewards [1/2, 1]
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from operator import mul
from typing import TYPE_CHECKING

from slime_core.errors import DataError
from slime_core.sample.sample import Group, Sample

if TYPE_CHECKING:
    from slime_core.protocols import Args


def executions(samples: Iterable[Sample]) -> list[Group]:
    """Group fan-out siblings; executions are in the order of their first samples."""
    samples = list(samples)
    ids = _ids(samples)
    if ids is None:
        return [[s] for s in samples]
    found: dict[Hashable, Group] = {}
    for key, sample in zip(ids, samples):
        found.setdefault(key, []).append(sample)
    return list(found.values())


def _ids(samples: Sequence[Sample]) -> list[Hashable] | None:
    """Return [n] keys, equal for siblings; None if no sample has a `rollout_id`, as in most rollouts."""
    ids: list[Hashable] = [s.rollout_id for s in samples]
    if ids.count(None) == len(ids):
        return None
    return [("no id", place) if one is None else one for place, one in enumerate(ids)]


def execution_rewards(args: Args, samples: Iterable[Sample], component: str | None = None) -> list[float]:
    """Return a scalar reward per execution: the mean reward of its scored siblings; unscored executions are left out.

    Args:
        args: The run's settings; `reward_key` picks from mapping rewards.
        samples: Samples of one group or several.
        component: Name in `Sample.reward_components` of the part to return instead; samples without it are left out.

    Raises:
        TypeError, KeyError: A reward is a mapping, and `reward_key` names no number in it.
        DataError: No scored sample has the component.
    """
    scored = [s for s in samples if s.reward is not None]
    if component is None:
        return [mean([float(s.get_reward_value(args)) for s in siblings]) for siblings in executions(scored)]
    having = [s for s in scored if component in (s.reward_components or {})]
    if scored and not having:
        raise DataError(
            f"component {component!r}: the reward of sample {scored[0].index} has the parts"
            f" {', '.join(scored[0].reward_components or ()) or 'none'} (Sample.reward_components)"
        )
    return [mean([(s.reward_components or {})[component] for s in siblings]) for siblings in executions(having)]


def shares(samples: Sequence[Sample]) -> list[float]:
    """Return [n] weights: 1 / number of each sample's siblings among `samples`, itself included."""
    ids = _ids(samples)
    return [1.0] * len(samples) if ids is None else [1.0 / count for count in sibling_counts(ids)]


def sibling_counts(ids: Sequence[Hashable], counted: Sequence[bool] | None = None) -> list[int]:
    """Return [n] counts of the entries with each entry's id, itself included.

    Args:
        ids: [n].
        counted: [n] whether each entry counts. An id without counted entries gives 1. None: all count.
    """
    counts = Counter(ids if counted is None else [i for i, counts in zip(ids, counted, strict=True) if counts])
    return [max(counts[i], 1) for i in ids]


def mean(values: Sequence[float]) -> float:
    """Return the arithmetic mean; if all values are equal, exactly that value, so comparisons with it hold."""
    first = values[0]
    return first if values.count(first) == len(values) else math.fsum(values) / len(values)


def weighted_mean(values: Sequence[float], weights: Sequence[float]) -> float:
    """Return sum(values * weights) / sum(weights). Raises ZeroDivisionError if the weights add up to 0."""
    return math.fsum(map(mul, values, weights)) / math.fsum(weights)
