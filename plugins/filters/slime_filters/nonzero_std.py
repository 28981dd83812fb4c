"""Drops groups whose rewards are all equal: under group normalisation they teach nothing (DAPO, Yu et al., 2025).

The condition is a deviation of more than 1e-6. A group with one reward says nothing about spread and is kept, unlike
in THUDM/slime, where its deviation is NaN and it is dropped.
"""

from __future__ import annotations

from slime_core import Args, FilterDecision, Group, execution_rewards
from slime_core.ops import deviation

MIN_STD = 1e-6


def dynamic_filter(args: Args, samples: Group) -> FilterDecision:
    """Keep iff the unbiased standard deviation exceeds 1e-6; the reason to drop is `zero_std_<reward>`.

    Samples without a reward (failed ones) are left out of the statistics; without any reward the group is dropped.
    Fan-out siblings are one member of their group, worth their mean.
    """
    rewards = execution_rewards(args, samples)
    if not rewards:
        return FilterDecision(keep=False, reason="no_reward")
    if len(rewards) == 1 or deviation(rewards) > MIN_STD:
        return FilterDecision(keep=True)
    return FilterDecision(keep=False, reason=f"zero_std_{round(rewards[0], 1)}")
