"""SAPO: a smooth gate on the ratio in place of PPO's clip (Gao et al., "Soft Adaptive Policy Optimization", 2025).

L_t = -4 / tau * sigmoid(tau * (ratio_t - 1)) * A_t (arXiv 2511.20347), with `tau_positive` where A_t > 0, else
`tau_negative`. A token's gradient is 4 p (1 - p) times that of ratio * A, p the sigmoid: all of it on-policy, and less
the further the ratio is from 1, on both sides. The larger `tau_negative` lets tokens of bad responses, which push up
all the other tokens of the vocabulary, fade faster. Advantages are GRPO's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar

import torch
from pydantic import Field

from slime_core import Args, LossInputs, LossOutputs, PluginOptions, options
from slime_core.ops import ratio_from_kl
from slime_estimators.grpo import GRPO


class Options(PluginOptions):
    """`plugins.sapo.*`"""

    tau_positive: Annotated[float, Field(ge=0.01, le=100)] = 1.0
    """Temperature of the gate where the advantage is above 0."""
    tau_negative: Annotated[float, Field(ge=0.01, le=100)] = 1.05
    """Temperature of the gate elsewhere; larger fades faster."""


class SAPO(GRPO):
    """Group-normalised rewards [n]; ratios behind a smooth gate. A group of one gets advantage 0."""

    Options: ClassVar[type[PluginOptions]] = Options
    ignores: ClassVar[Sequence[str]] = ("eps_clip", "eps_clip_high", "eps_clip_c")

    def __init__(self, args: Args) -> None:
        super().__init__(args)
        self.chosen = options(args, "sapo", Options)

    def policy_loss(self, args: Args, inputs: LossInputs) -> LossOutputs:
        """[T] loss; metrics `pg_clipfrac` (the part of the gradient that the gate takes away) and `ppo_kl`."""
        ppo_kl = self.policy_kl(inputs)
        advantages = inputs.advantages
        high, low = (torch.full_like(advantages, t) for t in (self.chosen.tau_positive, self.chosen.tau_negative))
        tau = torch.where(advantages > 0, high, low)
        gate = torch.sigmoid(tau * (ratio_from_kl(ppo_kl) - 1))
        lost = 1 - 4 * gate.detach() * (1 - gate.detach())
        return LossOutputs(-4 / tau * gate * advantages, {"pg_clipfrac": lost, "ppo_kl": ppo_kl.detach()})
