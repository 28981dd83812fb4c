"""PPO with a critic: generalised advantages over token rewards, the clipped surrogate, a clipped value loss.

r_t = -kl_coef * KL_t, plus the response's reward at its last unmasked token; delta_t = r_t + gamma * V_{t+1} - V_t with
V = 0 after the last token, A_t = delta_t + gamma * lambd * A_{t+1}, R_t = A_t + V_t (Schulman et al., 2016 and 2017).
The critic and its loss are the core's. Tokens that the policy did not sample (tool output) are skipped by the
recursion, not counted as states; THUDM/slime runs it over them, and puts the reward on the last token even if that is
masked.

Two options change lambda. `critic_lambd` is that of the returns R_t (Yuan et al., "What's Behind PPO's Collapse in
Long-CoT?", arXiv 2503.01491, 2025): 1 makes them sums of rewards, which no error of the values distorts. With
`length_alpha` the lambda of the advantages of a response of n trained tokens is 1 - 1 / (length_alpha * n), at least 0
(Yue et al., "VAPO", arXiv 2504.05118, 2025), so that the weights of the deltas add up to about length_alpha * n.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from pydantic import Field

from slime_core import AdvantageInputs, Advantages, Args, EstimatorBase, PluginOptions, options
from slime_core.errors import ConfigError
from slime_estimators.returns import masked_gae, token_rewards


class Options(PluginOptions):
    """`plugins.ppo.*`"""

    critic_lambd: Annotated[float | None, Field(ge=0, le=1)] = None
    """Lambda of the critic's returns; --lambd when not given."""
    length_alpha: Annotated[float | None, Field(gt=0)] = None
    """Lambda of the advantages by length, 1 - 1 / (length_alpha * trained tokens); --lambd when not given."""


class PPO(EstimatorBase):
    """Per-token advantages from a learned value function; no groups, one answer per prompt is enough."""

    needs_values: ClassVar[bool] = True
    Options: ClassVar[type[PluginOptions]] = Options

    def __init__(self, args: Args) -> None:
        """Raises ConfigError when both options leave `--lambd` without effect."""
        super().__init__(args)
        self.critic_lambd, self.length_alpha = self.lambdas(args)

    def lambdas(self, args: Args) -> tuple[float | None, float | None]:
        """Return `critic_lambd` and `length_alpha`."""
        chosen = options(args, "ppo", Options)
        if chosen.critic_lambd is not None and chosen.length_alpha is not None and args.lambd != 1.0:
            raise ConfigError(
                f"--lambd {args.lambd} has no effect with plugins.ppo.critic_lambd and plugins.ppo.length_alpha; remove"
                " one of the three"
            )
        return chosen.critic_lambd, chosen.length_alpha

    def advantages(self, args: Args, inputs: AdvantageInputs) -> Advantages:
        """Rewards [n], KL and values [n][response_length] -> advantages and returns, 0 where masked."""
        assert inputs.values is not None, "the learner computes values for estimators that need them"
        masks, values = inputs.loss_masks, inputs.values
        rewards = [
            token_rewards(reward, kl, mask, args.kl_coef)
            for reward, kl, mask in zip(inputs.rewards.tolist(), inputs.kl, masks)
        ]
        advantages, returns = masked_gae(rewards, values, masks, args.gamma, args.lambd)
        if self.length_alpha is not None:
            rows = zip(rewards, values, masks)
            advantages = [masked_gae([r], [v], [m], args.gamma, self._lambd(m))[0][0] for r, v, m in rows]
        if self.critic_lambd is not None:
            returns = masked_gae(rewards, values, masks, args.gamma, self.critic_lambd)[1]
        return Advantages(advantages=advantages, returns=returns)

    def _lambd(self, mask: torch.Tensor) -> float:
        assert self.length_alpha is not None
        return max(1 - 1 / (self.length_alpha * max(int((mask != 0).sum()), 1)), 0.0)
