"""Keeps groups whose mean reward, or share of passing samples, lies in a band: neither too hard nor too easy.

With a pass rate and the bounds just inside 0 and 1 this is DAPO's dynamic sampling (Yu et al., 2025) for rewards that
are right or wrong; narrower bounds are the online difficulty filtering of Bae et al. (2025).
"""

from __future__ import annotations

import math
from typing import Literal, Self

from pydantic import Field, model_validator

from slime_core import Args, FilterDecision, Group, PluginOptions, execution_rewards, options
from slime_core.ops import deviation


class Options(PluginOptions):
    """The band, and what must lie in it."""

    low: float = Field(default=0.2, allow_inf_nan=False)
    """Lowest value that is kept."""
    high: float = Field(default=0.8, allow_inf_nan=False)
    """Highest value that is kept."""
    of: Literal["pass_rate", "reward"] = "pass_rate"
    """Value that must lie in the band: the share of executions that pass, or the mean reward."""
    pass_reward: float = Field(default=1.0, allow_inf_nan=False)
    """Least reward of an execution that passes."""
    component: str | None = None
    """Part of the reward (`Sample.reward_components`) that counts in place of the reward."""
    fallback: bool = False
    """Keep a group outside the band when the rollout would otherwise lack one."""

    @model_validator(mode="after")
    def _is_a_band(self) -> Self:
        if self.low > self.high:
            raise ValueError(f"low {self.low} is above high {self.high}")
        return self


def dynamic_filter(args: Args, samples: Group) -> FilterDecision:
    """Keep iff low <= value <= high; the reason is `below_band`, `above_band` or `no_reward`.

    Samples without a reward (failed ones) are left out; fan-out siblings count once, with their mean reward. A dropped
    group ranks by the deviation of the number that is compared.
    """
    chosen = options(args, "band", Options)
    rewards = execution_rewards(args, samples, chosen.component)
    if not rewards:
        return FilterDecision(keep=False, reason="no_reward", keep_when_insufficient=chosen.fallback)
    values = [float(r >= chosen.pass_reward) for r in rewards] if chosen.of == "pass_rate" else rewards
    value = math.fsum(values) / len(values)
    if chosen.low <= value <= chosen.high:
        return FilterDecision(keep=True)
    reason = "below_band" if value < chosen.low else "above_band"
    return FilterDecision(False, reason, chosen.fallback, spread=deviation(rewards))
