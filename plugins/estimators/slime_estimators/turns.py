"""Rewards of turns, as `gigpo`, `mt_grpo` and `turn_credit` read them from `RewardInputs`."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from slime_core import PluginOptions, RewardInputs


class TurnOptions(PluginOptions):
    """Options that the estimators with turns share."""

    on_top: bool = False
    """The sample's reward comes on top of those of its turns; else it includes them, as multi_turn's sum does."""


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
