"""How far two policies are apart: ratios per token and per sequence, bounded correction weights, estimates of the KL.

Called by the base estimator, estimator plugins and off-policy corrections. Everything starts from `ppo_kl`, the
log-probability of the old policy minus the new one, so ratio = exp(-ppo_kl). The policy ratio (new / old, carries the
gradient) and the train/rollout mismatch weight (trainer / engine, a constant) are different quantities.

KL(policy || reference), for the reward and for the loss: with r = log p - log p_ref and tokens sampled from p: k1 = r,
k2 = r^2 / 2, k3 = exp(-r) - 1 + r (Schulman, "Approximating KL divergence", 2020). K1 and k3 are unbiased as values; as
losses their gradients are not the KL's unless weighted with the importance ratio (DeepSeek-V3.2's "unbiased KL").
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slime_core.errors import ConfigError
from slime_core.ops.masking import expand_to_tokens, segment_means

LOG_RATIO_LIMIT = 20.0
"""|log ratio| bound before exp: beyond it the update is lost anyway, and an infinite ratio would turn gradients NaN."""
_KINDS = ("k1", "k2", "k3", "low_var_kl")

_EXPONENT_LIMIT = 80.0
"""Keeps exp() finite in float32, so a clamped estimate has gradient 0 and not NaN."""


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


def kl_estimate(
    log_probs: torch.Tensor,
    ref_log_probs: torch.Tensor,
    kind: str,
    *,
    importance_log_ratio: torch.Tensor | None = None,
) -> torch.Tensor:
    """Estimate the KL to the reference at every token.

    Args:
        log_probs: [T] of the policy.
        ref_log_probs: [T] of the reference.
        kind: "k1", "k2", "k3" or "low_var_kl" (k3 clamped to [-10, 10]).
        importance_log_ratio: [T] log p - log p_old; the estimate is multiplied by its exponential before the
            clamp. Gradients flow through it.

    Returns:
        [T] float32 (float64 for float64 inputs).

    Raises:
        ConfigError: Unknown kind.
    """
    dtype = torch.promote_types(log_probs.dtype, torch.float32)
    r = log_probs.to(dtype) - ref_log_probs.to(dtype)
    if kind == "k1":
        kl = r
    elif kind == "k2":
        kl = r.square() / 2
    elif kind in ("k3", "low_var_kl"):
        kl = torch.exp((-r).clamp(max=_EXPONENT_LIMIT)) - 1 + r
    else:
        raise ConfigError(f"--kl-loss-type {kind!r}: allowed: {', '.join(_KINDS)}")
    if importance_log_ratio is not None:
        kl = kl * torch.exp(importance_log_ratio.to(dtype).clamp(max=_EXPONENT_LIMIT))
    return kl.clamp(-10.0, 10.0) if kind == "low_var_kl" else kl
