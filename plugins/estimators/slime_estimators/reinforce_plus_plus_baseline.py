"""REINFORCE++-baseline: the group's mean as baseline, whitening over the batch as scale (Hu, "REINFORCE++", 2025).

A_t = (r - mean(group)) - kl_coef * KL_t, whitened by the core over the tokens of all ranks. The deviation that divides
is thus the batch's and not the group's. `--disable-rewards-normalization` leaves out the mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from slime_core import AdvantageInputs, Advantages, Args, EstimatorBase, RewardInputs
from slime_core.ops import group_normalize


class ReinforcePlusPlusBaseline(EstimatorBase):
    """Centred rewards [n] with a KL penalty per token; a group of one is left with the penalty."""

    compares_group = True
    defaults: ClassVar[Mapping[str, Any]] = {"normalize_advantages": True}
    requires: ClassVar[Mapping[str, Any]] = {"normalize_advantages": True}
    ignores: ClassVar[Sequence[str]] = ("grpo_std_normalization", "gamma", "lambd")

    def shape_rewards(self, args: Args, inputs: RewardInputs) -> list[float]:
        """[n] rewards minus the mean of the group, fan-out siblings counting as one member."""
        if not args.rewards_normalization:
            return [float(reward) for reward in inputs.rewards]
        return group_normalize(inputs.rewards, inputs.group_indices, False, inputs.rollout_ids)

    def advantages(self, args: Args, inputs: AdvantageInputs) -> Advantages:
        """Lists of [response_length]: shaped reward minus the weighted KL, masked tokens included."""
        parts = [reward - args.kl_coef * kl for reward, kl in zip(inputs.rewards.tolist(), inputs.kl)]
        return Advantages(advantages=parts, returns=list(parts))
