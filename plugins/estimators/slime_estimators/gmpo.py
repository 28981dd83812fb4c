"""GMPO: the geometric mean of a response's clipped ratios (Zhao et al., "Geometric-Mean Policy Optimization", 2025).

L = -A * exp(mean over the response's tokens of log ratio_t), each log ratio bounded on the side to which A pushes it:
above by log(1 + eps_clip_high) where A > 0, below by log(1 - eps_clip) where A < 0 (arXiv 2507.20673, eq. 4). A few
outlying ratios move a geometric mean less than GRPO's arithmetic one, so the range may be wide: the paper's
(exp(-0.4), exp(0.4)) is the default here. Unlike GSPO, tokens are clipped one by one. Advantages are GRPO's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from slime_core import Args, LossInputs, LossOutputs
from slime_core.ops import expand_to_tokens, ratio_from_kl, segment_means, token_kl
from slime_estimators.grpo import GRPO


class GMPO(GRPO):
    """Group-normalised rewards [n]; one ratio per response, of clipped tokens. A group of one gets advantage 0."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "eps_clip": round(1 - math.exp(-0.4), 6),
        "eps_clip_high": round(math.exp(0.4) - 1, 6),
    }
    ignores: ClassVar[Sequence[str]] = ("eps_clip_c",)

    def policy_loss(self, args: Args, inputs: LossInputs) -> LossOutputs:
        """[T] loss; metrics `pg_clipfrac` (1 where the token's ratio was clipped) and `ppo_kl` (of the token)."""
        log_ratio = -token_kl(inputs.log_probs, inputs.old_log_probs)
        low = math.log1p(-args.eps_clip) if args.eps_clip < 1 else -math.inf
        high = math.log1p(args.eps_clip if args.eps_clip_high is None else args.eps_clip_high)
        bounded = torch.where(inputs.advantages > 0, log_ratio.clamp(max=high), log_ratio.clamp(min=low))
        mean = segment_means(bounded, inputs.loss_mask, inputs.sample_lengths)
        ratio = expand_to_tokens(ratio_from_kl(-mean), inputs.sample_lengths)
        clipped = (bounded != log_ratio).to(ratio.dtype)
        return LossOutputs(-ratio * inputs.advantages, {"pg_clipfrac": clipped, "ppo_kl": -log_ratio.detach()})
