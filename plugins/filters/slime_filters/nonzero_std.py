"""Drops groups whose rewards are all equal: under group normalisation they teach nothing (DAPO, Yu et al., 2025).

The condition is a deviation of more than 1e-6. A group with one reward has no deviation and is kept, unlike in
THUDM/slime, where its deviation is NaN and it is dropped. `plugins.nonzero_std.of` compares parts of the reward
instead: estimators that normalise them apart (GDPO) learn from a group whose sums are equal and whose parts differ.
"""

from __future__ import annotations

from pydantic import Field

from slime_core import Args, FilterDecision, Group, PluginOptions, execution_rewards, options
from slime_core.ops import deviation

MIN_STD = 1e-6


class Options(PluginOptions):
    """Numbers that must differ within a group."""

    of: str = Field(default="reward", min_length=1)
    """"reward", "components" for any part of the reward, or the name of one part (`Sample.reward_components`)."""


def dynamic_filter(args: Args, samples: Group) -> FilterDecision:
    """Keep iff the unbiased standard deviation exceeds 1e-6; the reason to drop is `zero_std_<reward>`.

    Samples without a reward (failed ones) are left out of the statistics; without any reward the group is dropped.
    Fan-out siblings are one member of their group, worth their mean.
    """
    return decision(args, samples, options(args, "nonzero_std", Options).of)


def decision(args: Args, samples: Group, of: str) -> FilterDecision:
    """Return `dynamic_filter`'s decision for the option `of`."""
    rewards = execution_rewards(args, samples)
    if not rewards:
        return FilterDecision(keep=False, reason="no_reward")
    names: list[str | None] = [None if of == "reward" else of]
    if of == "components":
        names = [*sorted({n for s in samples if s.reward is not None for n in s.reward_components or ()})] or [None]
    columns = [execution_rewards(args, samples, name) for name in names]
    if any(len(column) == 1 or deviation(column) > MIN_STD for column in columns):
        return FilterDecision(keep=True)
    return FilterDecision(keep=False, reason=f"zero_std_{round(rewards[0], 1)}")
