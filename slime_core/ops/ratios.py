"""How far two policies are apart: ratios per token and per sequence, bounded correction weights, estimates of the KL.

Called by the base estimator, estimator plugins and off-policy corrections. Everything starts from `ppo_kl`, the
log-probability of the old policy minus the new one, so ratio = exp(-ppo_kl). The policy ratio (new / old, carries the
gradient) and the train/rollout mismatch weight (trainer / engine, a constant) are different quantities.

KL(policy || reference), for the reward and for the loss: with r = log p - log p_ref and tokens sampled from p: k1 = r,
k2 = r^2 / 2, k3 = exp(-r) - 1 + r (Schulman, "Approximating KL divergence", 2020). K1 and k3 are unbiased as values; as
losses their gradients are not the KL's unless weighted with the importance ratio (DeepSeek-V3.2's "unbiased KL").

Surrogates (PPO's clip, dual clip, clipped value loss) are minimised; all inputs and outputs are [T], nothing is
masked or reduced. What is measured between trainer and engine is a constant of the loss, over response tokens of
several samples laid end to end; sources: OPSM, DeepSeek-V3.2; interpolation, Li et al., A-3PO (arXiv 2512.06547).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slime_core.errors import ConfigError
from slime_core.ops.masking import expand_to_tokens, masked, segment_means, segment_sums

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


def clipped_surrogate(
    ppo_kl: torch.Tensor,
    advantages: torch.Tensor,
    eps_clip: float,
    eps_clip_high: float | None = None,
    eps_clip_c: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """max(-ratio * A, -clip(ratio, 1 - eps_clip, 1 + eps_clip_high) * A) (PPO; asymmetric as in DAPO).

    Args:
        ppo_kl: [T] old minus new log-probs.
        advantages: [T].
        eps_clip: Lower clip distance.
        eps_clip_high: Upper clip distance; None means `eps_clip`.
        eps_clip_c: Dual clip (Ye et al., 2020): where A < 0 the loss is at most -eps_clip_c * A; must exceed 1.

    Returns:
        Loss, and 1.0 where the clip was active (detached).

    Raises:
        ValueError: `eps_clip_c` is 1 or less.
    """
    ratio = ratio_from_kl(ppo_kl)
    high = eps_clip if eps_clip_high is None else eps_clip_high
    unclipped = -ratio * advantages
    clipped = -ratio.clamp(1 - eps_clip, 1 + high) * advantages
    loss = torch.maximum(unclipped, clipped)
    clipfrac = (clipped > unclipped).to(loss.dtype)
    if eps_clip_c is not None:
        if eps_clip_c <= 1:
            raise ValueError(f"--eps-clip-c {eps_clip_c}: must be greater than 1")
        loss = torch.where(advantages < 0, torch.minimum(-eps_clip_c * advantages, loss), loss)
    return loss, clipfrac


def clipped_value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, value_clip: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """max((V_clip - R)^2, (V - R)^2) with V_clip = V_old + clip(V - V_old, -value_clip, value_clip).

    Returns:
        Loss (without a factor one half), and 1.0 where |V - V_old| > value_clip.
    """
    step = values - old_values
    clipped = old_values + step.clamp(-value_clip, value_clip)
    loss = torch.maximum((clipped - returns).square(), (values - returns).square())
    return loss, (step.detach().abs() > value_clip).to(loss.dtype)


def mismatch_metrics(
    train_log_probs: torch.Tensor, rollout_log_probs: torch.Tensor, mask: torch.Tensor, lengths: Sequence[int]
) -> dict[str, torch.Tensor]:
    """How far trainer and engine are apart, [T] each, sequence values repeated over the tokens.

    With r = trainer - engine log-prob of a token sampled by the engine: `kl` -r, `k3_kl` exp(r) - 1 - r (both
    estimate KL(engine || trainer)), `chi2_token` exp(2r) - 1 and `chi2_seq` the same of the sequence's sum (the chi
    squared divergence, that is the variance of the importance weight), perplexities of both and their gap.
    """
    r = (train_log_probs - rollout_log_probs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)

    def spread(per_sample: torch.Tensor) -> torch.Tensor:
        return expand_to_tokens(per_sample, lengths)

    training = spread(-segment_means(train_log_probs, mask, lengths))
    rollout = spread(-segment_means(rollout_log_probs, mask, lengths))
    sequence = spread(segment_sums(masked(r, mask), lengths)).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return {
        "kl": -r,
        "k3_kl": torch.expm1(r) - r,
        "chi2_token": torch.expm1(2 * r),
        "chi2_seq": torch.expm1(2 * sequence),
        "training_log_ppl": training,
        "training_ppl": training.exp(),
        "rollout_log_ppl": rollout,
        "rollout_ppl": rollout.exp(),
        "log_ppl_diff": training - rollout,
        "log_ppl_abs_diff": (training - rollout).abs(),
        "ppl_ratio": (training - rollout).exp(),
    }


def off_policy_sequences(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    lengths: Sequence[int],
    delta: float,
) -> torch.Tensor:
    """Return OPSM's mask, [T] 1.0 on tokens to leave out of the policy loss.

    These tokens have a negative advantage, in a sequence whose masked mean of old - new log-probs exceeds `delta`.
    """
    distance = segment_means((old_log_probs - log_probs).detach(), mask, lengths)
    far = expand_to_tokens(distance > delta, lengths)
    return ((advantages < 0) & far).to(mask.dtype)


def interpolated_log_probs(
    log_probs: torch.Tensor, rollout_log_probs: torch.Tensor, staleness: torch.Tensor | None
) -> torch.Tensor:
    """[T] proximal policy between behaviour and current policy, detached (A-3PO).

    log p_prox = a * log p_rollout + (1 - a) * log p with a = 1 / staleness: the staler the token, the nearer to the
    current policy. A fresh token has a = 0, the current policy. `staleness` None: all fresh.
    """
    current = log_probs.detach()
    if staleness is None:
        return current
    share = torch.where(staleness >= 1, 1 / staleness.clamp(min=1), torch.zeros_like(staleness))
    # Where the share is 0 the engine's value may be anything.
    return torch.where(share > 0, share * rollout_log_probs + (1 - share) * current, current)
