"""ReMax: the baseline of a response is the reward of the greedy answer to the same prompt (Li et al., "ReMax", 2023).

A_t = r - r(greedy) for every token. The rollout generates and scores one response more per prompt, at temperature 0
and with the same generate function and reward; it is not trained on. One sample per prompt is enough. The policy loss
is the base class's clipped surrogate, which at the first step of a rollout is REINFORCE.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from slime_core import Args, EstimatorBase, RewardInputs


class ReMax(EstimatorBase):
    """[n] rewards minus the reward of the prompt's greedy response."""

    needs_greedy_baseline: ClassVar[bool] = True
    ignores: ClassVar[Sequence[str]] = ("rewards_normalization", "grpo_std_normalization")

    def shape_rewards(self, args: Args, inputs: RewardInputs) -> list[float]:
        """[n] -> [n]; groups and siblings play no part."""
        assert inputs.baselines is not None, "the rollout stage provides them for needs_greedy_baseline"
        return [float(reward) - baseline for reward, baseline in zip(inputs.rewards, inputs.baselines, strict=True)]
