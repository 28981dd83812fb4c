"""Per-token estimates of KL(policy || reference) from the log-probs of the sampled tokens.

Called by the advantage stage (KL in the reward) and the loss stage (KL in the loss). With r = log p - log p_ref and
tokens sampled from p: k1 = r, k2 = r^2 / 2, k3 = exp(-r) - 1 + r (Schulman, "Approximating KL divergence", 2020). K1
and k3 are unbiased as values; as losses their gradients are not the KL's unless weighted with the importance ratio
(DeepSeek-V3.2's "unbiased KL").
"""

from __future__ import annotations

import torch

from slime_core.errors import ConfigError

_KINDS = ("k1", "k2", "k3", "low_var_kl")

_EXPONENT_LIMIT = 80.0
"""Keeps exp() finite in float32, so a clamped estimate has gradient 0 and not NaN."""


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
