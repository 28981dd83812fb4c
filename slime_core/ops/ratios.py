"""Importance ratios between two policies: per token, per sequence, and as bounded correction weights.

Called by the base estimator, estimator plugins and off-policy corrections. Everything starts from `ppo_kl`, the
log-probability of the old policy minus the new one, so ratio = exp(-ppo_kl). The policy ratio (new / old, carries the
gradient) and the train/rollout mismatch weight (trainer / engine, a constant) are different quantities.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slime_core.ops.masking import expand_to_tokens, segment_means

LOG_RATIO_LIMIT = 20.0
"""|log ratio| bound before exp: beyond it the update is lost anyway, and an infinite ratio would turn gradients NaN."""


def token_kl(log_probs: torch.Tensor, old_log_probs: torch.Tensor) -> torch.Tensor:
    """[T] old - new: the k1 estimate of KL(old || new), and minus the log ratio."""
    return old_log_probs - log_probs


def sequence_kl(
    log_probs: torch.Tensor, old_log_probs: torch.Tensor, loss_mask: torch.Tensor, sample_lengths: Sequence[int]
) -> torch.Tensor:
    """[T] each sample's masked mean of `token_kl`, repeated over its tokens; differentiable.

    exp(-value) is GSPO's length-normalised sequence ratio (Zheng et al., "Group Sequence Policy Optimization").
    """
    means = segment_means(token_kl(log_probs, old_log_probs), loss_mask, sample_lengths)
    return expand_to_tokens(means, sample_lengths)


def ratio_from_kl(ppo_kl: torch.Tensor) -> torch.Tensor:
    """exp(-ppo_kl), with the exponent bounded by `LOG_RATIO_LIMIT`."""
    return torch.exp((-ppo_kl).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


def importance_ratio(train_log_probs: torch.Tensor, rollout_log_probs: torch.Tensor) -> torch.Tensor:
    """[T] trainer / engine probability of the sampled token, detached."""
    return ratio_from_kl((rollout_log_probs - train_log_probs).detach())


def truncated_weight(importance: torch.Tensor, low: float, high: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Truncated importance sampling: (clamp(w, low, high), 1.0 where that changed w), [T] each."""
    weight = importance.clamp(low, high)
    return weight, (weight != importance).to(importance.dtype)


def icepop_weight(importance: torch.Tensor, low: float, high: float) -> tuple[torch.Tensor, torch.Tensor]:
    """IcePop: (w inside [low, high], 0 outside; 1.0 where dropped), [T] each."""
    outside = (importance < low) | (importance > high)
    return importance.masked_fill(outside, 0.0), outside.to(importance.dtype)
