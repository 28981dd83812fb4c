"""Prefer prompts that are neither too easy nor too hard: prompts whose pass rate lies in a band.

The pass rate of a prompt is an exponential moving average over its groups. Groups dropped by a dynamic filter count
too, because the filter drops exactly the groups that are always right:

    rate <- rate + rate_weight * (share of the group's executions with reward >= pass_reward - rate)

A prompt without a rate is always used. A prompt outside [low, high] is skipped with a probability, but at most
`max_skips` times in a row, so it is tried again and can return to the band. The draws are a hash of seed, row and a
counter, so no state of a random generator has to be stored.
"""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Mapping
from typing import Any, Self

from pydantic import Field, model_validator

from slime_core import Args, BufferBase, Group, PluginOptions, Sample, execution_rewards, options


class Options(PluginOptions):
    """The band of pass rates, and how to skip prompts outside it."""

    low: float = Field(default=0.2, ge=0, le=1)
    """Lowest pass rate of the band; below it a prompt is too hard."""
    high: float = Field(default=0.8, ge=0, le=1)
    """Highest pass rate of the band; above it a prompt is too easy."""
    pass_reward: float = Field(default=1.0, allow_inf_nan=False)
    """Minimum reward of an execution that passes; the reward of fan-out siblings is their mean."""
    component: str | None = None
    """Part of the reward (`Sample.reward_components`) that counts in place of the reward."""
    rate_weight: float = Field(default=0.5, gt=0, le=1)
    """Weight of the newest group in a prompt's pass rate."""
    skip_probability: float = Field(default=0.9, ge=0, le=1)
    """Probability of skipping a prompt outside the band when its turn comes."""
    max_skips: int = Field(default=8, ge=1)
    """Maximum number of skips in a row; the prompt is used the next time."""

    @model_validator(mode="after")
    def _is_a_band(self) -> Self:
        if self.low > self.high:
            raise ValueError(f"low {self.low} is above high {self.high}")
        return self


class Buffer(BufferBase):
    """A first-in, first-out queue of waiting groups; `wants` chooses prompts."""

    def __init__(self, args: Args) -> None:
        super().__init__(args)
        self._options = options(args, "curriculum", Options)
        self._rates: dict[int, float] = {}
        self._skips: dict[int, int] = {}
        self._decisions = 0
        self._skipped = {"easy": 0, "hard": 0}

    def wants(self, prompt: Sample) -> bool:
        """Return whether to use the prompt: its pass rate is unknown or in the band, or it is not skipped this time."""
        row, chosen = prompt.row, self._options
        if row is None or row not in self._rates:
            return True
        rate, skips = self._rates[row], self._skips.get(row, 0)
        if not chosen.low <= rate <= chosen.high and skips < chosen.max_skips:
            self._decisions += 1
            if _uniform(self.args.rollout_seed, row, self._decisions) < chosen.skip_probability:
                self._skips[row] = skips + 1
                self._skipped["easy" if rate > chosen.high else "hard"] += 1
                return False
        self._skips.pop(row, None)
        return True

    def observe(self, groups: list[Group], trained: bool) -> None:
        """Update the prompts' pass rates."""
        for group in groups:
            rewards = execution_rewards(self.args, group, self._options.component)
            row = group[0].row
            if row is None or not rewards:
                continue
            rate = statistics.fmean(reward >= self._options.pass_reward for reward in rewards)
            known = self._rates.get(row, rate)
            self._rates[row] = known + self._options.rate_weight * (rate - known)

    def take_metrics(self) -> dict[str, float]:
        """Return the numbers of prompts skipped since the last call, and of prompts with a known pass rate."""
        skipped, self._skipped = self._skipped, {"easy": 0, "hard": 0}
        metrics = {f"rollout/curriculum/skipped_{kind}": float(count) for kind, count in skipped.items()}
        return {**metrics, "rollout/curriculum/known_prompts": float(len(self._rates))}

    def state_dict(self) -> dict[str, Any]:
        """Return waiting groups, pass rates, skips in a row and counters."""
        return {
            **super().state_dict(),
            "rates": sorted([row, rate] for row, rate in self._rates.items()),
            "skips": sorted([row, times] for row, times in self._skips.items()),
            "decisions": self._decisions,
            "skipped": dict(self._skipped),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state from `state_dict`."""
        super().load_state_dict(state)
        self._rates = dict(state["rates"])
        self._skips = dict(state["skips"])
        self._decisions = int(state["decisions"])
        self._skipped = dict(state["skipped"])


def _uniform(*parts: int) -> float:
    """Return a number in [0, 1) that depends only on the arguments."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2**64
