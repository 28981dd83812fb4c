"""REINFORCE++: discounted token rewards with a KL penalty, whitened over the whole batch; no groups, no critic.

r_t = -kl_coef * KL_t * mask_t, plus the response's reward at its last unmasked token; A_t = R_t = sum_k gamma^k
r_{t+k} (Hu, "REINFORCE++", 2025). The core then whitens the advantages over all ranks, which the algorithm cannot
do without. A sample without an unmasked token has nothing to put its reward on and gets zeros (THUDM/slime stops
there).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from slime_core import AdvantageInputs, Advantages, Args, EstimatorBase
from slime_estimators.returns import discounted_returns, pad_right, token_rewards, unpad


class ReinforcePlusPlus(EstimatorBase):
    """Per-token discounted returns of reward and KL penalty."""

    defaults: ClassVar[Mapping[str, Any]] = {"normalize_advantages": True}
    requires: ClassVar[Mapping[str, Any]] = {"normalize_advantages": True}
    ignores: ClassVar[Sequence[str]] = ("lambd",)

    def advantages(self, args: Args, inputs: AdvantageInputs) -> Advantages:
        """Lists of [response_length] -> returns, which are the advantages too."""
        if not inputs.loss_masks:
            return Advantages(advantages=[], returns=[])
        rewards = [
            token_rewards(reward, kl, mask, args.kl_coef)
            for reward, kl, mask in zip(inputs.rewards.tolist(), inputs.kl, inputs.loss_masks)
        ]
        returns = unpad(discounted_returns(pad_right(rewards), args.gamma), inputs.response_lengths)
        return Advantages(advantages=returns, returns=list(returns))
