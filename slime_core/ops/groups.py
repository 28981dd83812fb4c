"""Group-relative rewards: subtract the mean of the prompt's group, optionally divide by its deviation.

Called by estimator plugins in `shape_rewards`. Groups are formed by `group_index`, never by position: THUDM/slime
reshapes the flat list to (-1, N) and so mixes prompts as soon as a group is uneven. Plain Python, exact sums.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from slime_core.sample import LARGEST_SCORE

_STD_EPS = 1e-6


def group_normalize(
    rewards: Sequence[float], group_indices: Sequence[int], std: bool, rollout_ids: Sequence[int] | None = None
) -> list[float]:
    """(reward - group mean), divided by (unbiased group deviation + 1e-6) when `std`.

    Fan-out siblings (equal `rollout_ids`) are one member of their group, worth the mean of their rewards, so a
    rollout split into many samples does not outvote the others. A group of one member has no deviation and is
    only centred (0 without siblings).

    Args:
        rewards: [n].
        group_indices: [n] prompt group of each sample.
        std: Divide by the deviation (GRPO); False leaves Dr. GRPO's centred reward.
        rollout_ids: [n]; None means that every sample is its own rollout.

    Returns:
        [n] in the order given.
    """
    values = group_members(rewards, group_indices, rollout_ids)
    means = {group: _mean([*members.values()]) for group, members in values.items()}
    scales = {g: deviation([*m.values()]) + _STD_EPS if std and len(m) > 1 else 1.0 for g, m in values.items()}
    return [(float(r) - means[g]) / scales[g] for r, g in zip(rewards, group_indices)]


def deviation(values: Sequence[float]) -> float:
    """Return the unbiased standard deviation; 0 of one value. Neither sums nor squares of large values overflow."""
    return math.dist(values, [_mean(values)] * len(values)) / math.sqrt(max(len(values) - 1, 1))


def group_members(
    rewards: Sequence[float], group_indices: Sequence[int], rollout_ids: Sequence[int] | None = None
) -> dict[int, dict[int, float]]:
    """Group -> rollout id -> the member's reward: the mean over its fan-out siblings.

    What every group statistic starts from. Arguments as in `group_normalize`.
    """
    ids = list(range(len(rewards))) if rollout_ids is None else list(rollout_ids)
    if not len(rewards) == len(group_indices) == len(ids):
        raise ValueError(f"{len(rewards)} rewards, {len(group_indices)} group_indices, {len(ids)} rollout_ids")
    siblings: dict[int, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for reward, group, rollout in zip(rewards, group_indices, ids):
        siblings[group][rollout].append(float(reward))
    return {
        group: {rollout: math.fsum(values) / len(values) for rollout, values in members.items()}
        for group, members in siblings.items()
    }


def _mean(values: Sequence[float]) -> float:
    size = max(1.0, *(abs(value) / LARGEST_SCORE for value in values))  # 1, which changes no bit, for usual rewards
    return math.fsum(value / size for value in values) / len(values) * size
