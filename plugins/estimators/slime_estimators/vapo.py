"""VAPO, a preset: PPO for long answers (Yue et al., "VAPO", arXiv 2504.05118, 2025).

- the returns of the critic are sums of rewards (lambda 1), the advantages take lambda by length (see `ppo.py`);
- the first rollouts train the critic alone: say so with `--num-critic-only-steps` (the paper: 50);
- clip-higher and a token-level loss, as in DAPO;
- the response's correct answers are imitated, too: L_t += -positive_nll * log p_t where the return R_t is above 0.

`returns` are the shaped reward at every token with the default `--gamma 1` and without `--kl-coef`, so "above 0" means
"correct" for a reward that is not positive for a wrong answer. All but the last are settings or options of `ppo`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar

from pydantic import Field

from slime_core import Args, LossInputs, LossOutputs, PluginOptions, options
from slime_estimators.ppo import PPO


class Options(PluginOptions):
    """`plugins.vapo.*`"""

    critic_lambd: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Lambda of the critic's returns."""
    length_alpha: Annotated[float, Field(gt=0)] = 0.05
    """Lambda of the advantages by length: 1 - 1 / (length_alpha * trained tokens)."""
    positive_nll: Annotated[float, Field(ge=0)] = 0.1
    """Weight of minus the log-probs of responses whose return is above 0; 0 switches it off."""


class VAPO(PPO):
    """PPO with its lambdas apart, and a log-likelihood term on what was right."""

    Options: ClassVar[type[PluginOptions]] = Options
    defaults: ClassVar[Mapping[str, Any]] = {
        "eps_clip_high": 0.28,
        "calculate_per_token_loss": True,
    }
    ignores: ClassVar[Sequence[str]] = ("lambd",)

    def lambdas(self, args: Args) -> tuple[float, float]:
        """Return `critic_lambd` and `length_alpha`."""
        chosen = options(args, "vapo", Options)
        return chosen.critic_lambd, chosen.length_alpha

    def policy_loss(self, args: Args, inputs: LossInputs) -> LossOutputs:
        """PPO's loss and metrics, with the log-likelihood term."""
        found, weight = super().policy_loss(args, inputs), options(args, "vapo", Options).positive_nll
        if not weight:
            return found
        assert inputs.returns is not None, "advantages are computed for every policy loss"
        right = (inputs.returns > 0).to(found.loss.dtype)
        return replace(found, loss=found.loss - weight * right * inputs.log_probs)
