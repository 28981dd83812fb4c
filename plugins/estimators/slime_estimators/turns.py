"""Rewards of turns, as `gigpo`, `mt_grpo` and `turn_credit` read them from `RewardInputs`."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import ClassVar

from slime_core import AdvantageInputs, Advantages, Args, EstimatorBase, PluginOptions, RewardInputs


class TurnOptions(PluginOptions):
    """Options that the estimators with turns share."""

    on_top: bool = False
    """The sample's reward comes on top of those of its turns; else it includes them, as multi_turn's sum does."""


class SampleAndTurns(EstimatorBase):
    """An estimator with a part of the sample and a part of the turn in the advantage of every token of a turn."""

    compares_group = True
    ignores: ClassVar[Sequence[str]] = ("rewards_normalization",)

    def advantages(self, args: Args, inputs: AdvantageInputs) -> Advantages:
        """Return the sum of both parts for every token."""
        whole = super().advantages(args, inputs).advantages
        parts = [sample + turn for sample, turn in zip(whole, inputs.over_turns(inputs.turn_rewards))]
        return Advantages(advantages=parts, returns=list(parts))


def turn_rewards(inputs: RewardInputs, on_top: bool) -> list[list[float]]:
    """Return the reward of every turn of every sample; the last turn's is all that the turns before it leave.

    So the sum over a sample's turns is the sample's whole reward, and a sample without rewards of turns has its reward
    on its last turn.
    """
    found = []
    for reward, row in zip(inputs.rewards, inputs.turn_rewards):
        values = [value or 0.0 for value in row]
        if values and not on_top:
            values[-1] = reward - sum(values[:-1])
        elif values:
            values[-1] += reward
        found.append(values)
    return found


def returns(rewards: Sequence[float], gamma: float) -> list[float]:
    """Return G_k = r_k + gamma * G_{k+1} of one sample's turns."""
    found, following = [], 0.0
    for reward in reversed(rewards):
        following = reward + gamma * following
        found.append(following)
    return found[::-1]


def numbered(keys: Sequence[Hashable]) -> list[int]:
    """Return a number for each key, the same for equal keys."""
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return [numbers[key] for key in keys]
