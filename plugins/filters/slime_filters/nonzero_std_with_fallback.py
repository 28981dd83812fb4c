"""Drops groups whose rewards are all equal, as long as there are others: `nonzero_std` that never draws a group more.

The condition and the reasons are `nonzero_std`'s (DAPO, Yu et al., 2025; the fallback is THUDM/slime's): a deviation of
at most 1e-6 drops the group, but it stays when the rollout would otherwise lack a group. So only what was started in
excess (`--over-sampling-batch-size`) is chosen from, and the number of prompts per rollout is bounded.
"""

from __future__ import annotations

from slime_core import Args, FilterDecision, Group, execution_rewards
from slime_core.ops import deviation

MIN_STD = 1e-6


def dynamic_filter(args: Args, samples: Group) -> FilterDecision:
    """Keep iff the unbiased standard deviation exceeds 1e-6; else leave it to whether there are enough groups.

    Samples without a reward (failed ones) are left out of the statistics; a single reward says nothing about spread
    and the group is kept. Fan-out siblings are one member of their group, worth their mean.
    """
    rewards = execution_rewards(args, samples)
    if len(rewards) == 1 or (rewards and deviation(rewards) > MIN_STD):
        return FilterDecision(keep=True)
    reason = f"zero_std_{round(rewards[0], 1)}" if rewards else "no_reward"
    return FilterDecision(keep=False, reason=reason, keep_when_insufficient=True)
