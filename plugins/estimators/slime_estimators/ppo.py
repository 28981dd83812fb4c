"""PPO with a critic: generalised advantages over token rewards, the clipped surrogate, a clipped value loss.

r_t = -kl_coef * KL_t, plus the response's reward at its last unmasked token; delta_t = r_t + gamma * V_{t+1} - V_t with
V = 0 after the last token, A_t = delta_t + gamma * lambd * A_{t+1}, R_t = A_t + V_t (Schulman et al., 2016 and 2017).
The critic and its loss are the core's. Tokens that the policy did not sample (tool output) are skipped by the
recursion, not counted as states; THUDM/slime runs it over them, and puts the reward on the last token even if that is
masked.
"""

from __future__ import annotations

from typing import ClassVar

from slime_core import AdvantageInputs, Advantages, Args, EstimatorBase
from slime_core.ops import masked_gae, token_rewards


class PPO(EstimatorBase):
    """Per-token advantages from a learned value function; no groups, one answer per prompt is enough."""

    needs_values: ClassVar[bool] = True

    def advantages(self, args: Args, inputs: AdvantageInputs) -> Advantages:
        """Rewards [n], KL and values [n][response_length] -> advantages and returns, 0 where masked."""
        assert inputs.values is not None, "the learner computes values for estimators that need them"
        rewards = [
            token_rewards(reward, kl, mask, args.kl_coef)
            for reward, kl, mask in zip(inputs.rewards.tolist(), inputs.kl, inputs.loss_masks)
        ]
        advantages, returns = masked_gae(rewards, inputs.values, inputs.loss_masks, args.gamma, args.lambd)
        return Advantages(advantages=advantages, returns=returns)
