"""Samples -> executions: what counts once where a generate function returned several samples (fan-out).

Filters, buffers, statistics and metrics call `executions` or `execution_rewards` before they count or average. Standard
library only. Siblings are known by `rollout_id` and by nothing else. Samples without one are executions of their own;
two samples of the run with the same one are siblings, wherever they stand.

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

from slime_core.sample import Group, Sample

if TYPE_CHECKING:
    from slime_core.protocols import Args


def executions(samples: Iterable[Sample]) -> list[Group]:
    """Fan-out siblings together, in the order in which a first sample of each execution comes."""
    samples = list(samples)
    ids = _ids(samples)
    if ids is None:
        return [[s] for s in samples]
    found: dict[Hashable, Group] = {}
    for key, sample in zip(ids, samples):
        found.setdefault(key, []).append(sample)
    return list(found.values())


def _ids(samples: Sequence[Sample]) -> list[Hashable] | None:
    """[n] equal for siblings; None where no sample has any, as in most rollouts."""
    ids: list[Hashable] = [s.rollout_id for s in samples]
    if ids.count(None) == len(ids):
        return None
    return [("no id", place) if one is None else one for place, one in enumerate(ids)]


def execution_rewards(args: Args, samples: Iterable[Sample]) -> list[float]:
    """One scalar reward per execution: the mean over its siblings that have one; executions without any are left out.

    Args:
        args: The run's settings; `reward_key` picks from mapping rewards.
        samples: Of one group or several.

    Raises:
        TypeError, KeyError: A reward is a mapping, and `reward_key` names no number in it.
    """
    scored = executions(s for s in samples if s.reward is not None)
    return [mean([float(s.get_reward_value(args)) for s in siblings]) for siblings in scored]


def shares(samples: Sequence[Sample]) -> list[float]:
    """[n] what each sample counts: 1 / number of its siblings among `samples`, itself included."""
    ids = _ids(samples)
    return [1.0] * len(samples) if ids is None else [1.0 / count for count in sibling_counts(ids)]


def sibling_counts(ids: Sequence[Hashable], counted: Sequence[bool] | None = None) -> list[int]:
    """[n] how many entries have each entry's id, itself included.

    Args:
        ids: [n].
        counted: [n] entries that count; where none of an id does, the result is 1. None: all count.
    """
    counts = Counter(ids if counted is None else [i for i, counts in zip(ids, counted, strict=True) if counts])
    return [max(counts[i], 1) for i in ids]


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean; exactly their value where all are equal, so that comparisons with it hold."""
    first = values[0]
    return first if values.count(first) == len(values) else math.fsum(values) / len(values)


def weighted_mean(values: Sequence[float], weights: Sequence[float]) -> float:
    """Sum of values times weights over the sum of weights. Raises ZeroDivisionError where the weights add up to 0."""
    return math.fsum(map(mul, values, weights)) / math.fsum(weights)
