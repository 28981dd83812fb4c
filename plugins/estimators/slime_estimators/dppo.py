"""DPPO: a trust region by the divergence of two policies at a token (Qi et al., arXiv 2602.04879, 2026).

L_t = -M_t * ratio_t * A_t. M_t is 0 where the update would push a token further out (A > 0 and ratio > 1, or A < 0 and
ratio < 1) whose divergence D exceeds `threshold`, else 1. With p and q the token's probability before and now, D is
that of "this token or another" ("binary" in the paper):

    tv   |p - q|                                              the paper's code takes 0.15
    kl   p log(p / q) + (1 - p) log((1 - p) / (1 - q))         and 0.05

PPO's clip bounds q / p: it stops a rare token that doubles from 0.1% to 0.2%, and lets a frequent one fall from 99% to
80%. The region is around the policy that sampled, so the preset takes the engine's log-probs as the old ones. The
paper's variants over the k most likely tokens need logits and are not here. Advantages are GRPO's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field

from slime_core import Args, LossInputs, LossOutputs, PluginOptions, options
from slime_core.ops import ratio_from_kl
from slime_estimators.grpo import GRPO

_THRESHOLDS = {"tv": 0.15, "kl": 0.05}


class Options(PluginOptions):
    """`plugins.dppo.*`"""

    divergence: Literal["tv", "kl"] = "tv"
    """Divergence at a token: total variation, or the KL of the old policy to the new one."""
    threshold: Annotated[float | None, Field(ge=0)] = None
    """Largest divergence of a token that is pushed further out; 0.15 for tv and 0.05 for kl when not given."""


class DPPO(GRPO):
    """Group-normalised rewards [n]; tokens masked by divergence. A group of one gets advantage 0."""

    Options: ClassVar[type[PluginOptions]] = Options
    defaults: ClassVar[Mapping[str, Any]] = {"use_rollout_logprobs": True}
    ignores: ClassVar[Sequence[str]] = ("eps_clip", "eps_clip_high", "eps_clip_c")

    def __init__(self, args: Args) -> None:
        super().__init__(args)
        chosen = options(args, "dppo", Options)
        self.divergence = binary_kl if chosen.divergence == "kl" else total_variation
        self.threshold = _THRESHOLDS[chosen.divergence] if chosen.threshold is None else chosen.threshold

    def policy_loss(self, args: Args, inputs: LossInputs) -> LossOutputs:
        """[T] loss; metrics `pg_clipfrac` (1 where masked) and `ppo_kl` (old minus new log-probs)."""
        ppo_kl = self.policy_kl(inputs)
        far = self.divergence(inputs.old_log_probs, inputs.log_probs.detach()) > self.threshold
        outward = inputs.advantages * -ppo_kl.detach() > 0
        masked = (far & outward).to(ppo_kl.dtype)
        loss = -(1 - masked) * ratio_from_kl(ppo_kl) * inputs.advantages
        return LossOutputs(loss, {"pg_clipfrac": masked, "ppo_kl": ppo_kl.detach()})


def total_variation(old_log_probs: torch.Tensor, log_probs: torch.Tensor) -> torch.Tensor:
    """Return |p - q| of each token, [T]."""
    return (old_log_probs.exp() - log_probs.exp()).abs()


def binary_kl(old_log_probs: torch.Tensor, log_probs: torch.Tensor) -> torch.Tensor:
    """Return KL(p || q) of "this token or another", [T]; infinite where q is 1 and p is not."""
    old, new = old_log_probs.clamp(max=0), log_probs.clamp(max=0)
    rest_old, rest_new = torch.log(-torch.expm1(old)), torch.log(-torch.expm1(new))
    others = -torch.expm1(old)
    other = torch.where(others > 0, others * (rest_old - rest_new), torch.zeros_like(old))
    return old.exp() * (old - new) + other
