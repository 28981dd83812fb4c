"""CISPO: the importance weight is clipped, not the token (MiniMax, "MiniMax-M1", 2025).

L_t = -stopgrad(clip(ratio_t, 1 - eps_clip, 1 + eps_clip_high)) * A_t * log p_t: a token outside the range keeps its
gradient with a bounded weight, where PPO's clip would drop it. Advantages are GRPO's: (r - mean(group)) / (std(group) +
1e-6).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from slime_core import Args, EstimatorBase, LossInputs, LossOutputs, RewardInputs
from slime_core.ops import group_normalize, ratio_from_kl


class CISPO(EstimatorBase):
    """Group-normalised rewards [n]; clipped importance weights. A group of one gets advantage 0."""

    compares_group = True
    ignores: ClassVar[Sequence[str]] = ("eps_clip_c",)

    def shape_rewards(self, args: Args, inputs: RewardInputs) -> list[float]:
        """[n] rewards normalised within each `group_index`, as GRPO's."""
        if not args.rewards_normalization:
            return super().shape_rewards(args, inputs)
        return group_normalize(inputs.rewards, inputs.group_indices, args.grpo_std_normalization, inputs.rollout_ids)

    def policy_loss(self, args: Args, inputs: LossInputs) -> LossOutputs:
        """[T] loss; metrics `pg_clipfrac` (1 where the weight was clipped) and `ppo_kl` (old minus new log-probs)."""
        ppo_kl = self.policy_kl(inputs)
        loss, clipfrac = cispo_surrogate(ppo_kl, inputs.log_probs, inputs.advantages, args.eps_clip, args.eps_clip_high)
        return LossOutputs(loss=loss, metrics={"pg_clipfrac": clipfrac, "ppo_kl": ppo_kl.detach()})


def cispo_surrogate(
    ppo_kl: torch.Tensor,
    log_probs: torch.Tensor,
    advantages: torch.Tensor,
    eps_clip: float,
    eps_clip_high: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """-stopgrad(clip(ratio)) * A * log p: every token keeps its gradient (MiniMax-M1's CISPO).

    Returns:
        Loss, and 1.0 where the ratio was clipped (detached).
    """
    ratio = ratio_from_kl(ppo_kl).detach()
    high = eps_clip if eps_clip_high is None else eps_clip_high
    clipped = ratio.clamp(1 - eps_clip, 1 + high)
    return -clipped * advantages * log_probs, (clipped != ratio).to(ratio.dtype)
