"""Choose the groups to train on, with a dynamic sampling filter and a buffer filter.

    slime train --config demo.yaml --over-sampling-batch-size 48 \
        --dynamic-sampling-filter-path examples/custom_filter.py \
        --buffer-filter-path examples/custom_filter.py

The dynamic sampling filter sees every scored group. A dropped group is replaced by a new one, and counted as
`rollout/dynamic_filter/drop_<reason>`. The buffer filter decides which of the returned groups (surplus of
over-sampling, and unfinished groups) are drawn again. It must *remove* the groups that it returns from the list.
"""

from __future__ import annotations

from typing import Any

from slime_core import FilterDecision, Group


def dynamic_filter(args: Any, samples: Group) -> FilterDecision:
    """Keep groups that are neither hopeless nor solved: mean reward within `keep_between`, (0.1, 0.9) by default."""
    low, high = getattr(args, "keep_between", (0.1, 0.9))
    rewards = [sample.get_reward_value(args) for sample in samples if sample.reward is not None]
    if not rewards:
        return FilterDecision(keep=False, reason="no_reward")
    mean = sum(rewards) / len(rewards)
    if mean < low:
        return FilterDecision(keep=False, reason="too_hard", keep_when_insufficient=True)
    return FilterDecision(keep=mean <= high, reason="too_easy", keep_when_insufficient=True)


def buffer_filter(args: Any, rollout_id: int | None, buffer: list[Group], num_samples: int) -> list[Group]:
    """Newest first."""
    taken = buffer[-num_samples:][::-1]
    del buffer[-num_samples:]
    return taken
