"""GDPO: each part of a reward is normalised on its own (Liu et al., arXiv 2601.05242, 2026).

A_i = sum_k weight_k * (r_ik - mean_k) / (std_k + 1e-6), with mean and unbiased deviation of part k over the prompt's
group, then (A_i - mean) / (std + 1e-6) over all rollouts of the batch, so that the number of parts does not change the
size of the advantages. Summed first, as in GRPO, responses with the same sum get the same advantage whatever their
parts, and the part of largest spread has the say. Parts are `Sample.reward_components`: a reward that returns a
mapping, `weighted_sum`, environments.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

from slime_core import Args, EstimatorBase, PluginOptions, RewardInputs, options
from slime_core.errors import RolloutError
from slime_core.ops import deviation, group_members, group_normalize


class Options(PluginOptions):
    """`plugins.gdpo.*`"""

    weights: dict[str, float] | None = None
    """Weight of each part that counts; without them every part of the rewards counts once."""


class GDPO(EstimatorBase):
    """[n] sums of parts, normalised by part and group, then over the batch. A group of one gets advantage 0."""

    compares_group = True
    needs_components = True
    Options: ClassVar[type[PluginOptions]] = Options
    ignores: ClassVar[Sequence[str]] = ("rewards_normalization",)

    def __init__(self, args: Args) -> None:
        super().__init__(args)
        self.weights = options(args, "gdpo", Options).weights

    def shape_rewards(self, args: Args, inputs: RewardInputs) -> list[float]:
        """[n] parts -> [n].

        Raises:
            RolloutError: A sample lacks a part, or no sample has parts.
        """
        sums = [0.0] * len(inputs.rewards)
        for name, weight in self._weights(inputs).items():
            values = [parts[name] for parts in inputs.components]
            shaped = group_normalize(values, inputs.group_indices, args.grpo_std_normalization, inputs.rollout_ids)
            sums = [total + weight * value for total, value in zip(sums, shaped)]
        members = [*group_members(sums, [0] * len(sums), inputs.rollout_ids).get(0, {}).values()]
        mean, scale = math.fsum(members) / max(len(members), 1), deviation(members) + 1e-6 if members else 1.0
        return [(value - mean) / scale for value in sums]

    def _weights(self, inputs: RewardInputs) -> dict[str, float]:
        present = {name for parts in inputs.components for name in parts}
        weights = self.weights if self.weights is not None else dict.fromkeys(sorted(present), 1.0)
        lacking = [name for name in weights if not all(name in parts for parts in inputs.components)]
        if (inputs.rewards and not weights) or lacking:
            named = f"{', '.join(map(repr, lacking))} on every sample" if lacking else "rewards with parts"
            raise RolloutError(
                f"--advantage-estimator gdpo needs {named}; these have {', '.join(sorted(present)) or 'none'}: let the"
                " reward return a mapping of numbers (with --reward-key), choose --custom-rm-path weighted_sum, or"
                " name the parts in plugins.gdpo.weights"
            )
        return weights
