"""How far apart trainer and engine are, and what is made of it on plain tensors.

Called by the policy loss and by correction plugins. Layout: response tokens of several samples laid end to end, [T].
Everything is a constant of the loss; nothing here carries a gradient.

Sources: OPSM, DeepSeek-V3.2; interpolation, Li et al., A-3PO (arXiv 2512.06547).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slime_core.ops.masking import expand_to_tokens, masked, segment_means, segment_sums
from slime_core.ops.ratios import LOG_RATIO_LIMIT


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
    """OPSM: [T] 1.0 on tokens to leave out of the policy loss.

    Those with a negative advantage in a sequence whose masked mean of old - new log-probs exceeds `delta`.
    """
    distance = segment_means((old_log_probs - log_probs).detach(), mask, lengths)
    far = expand_to_tokens(distance > delta, lengths)
    return ((advantages < 0) & far).to(mask.dtype)


def interpolated_log_probs(
    log_probs: torch.Tensor, rollout_log_probs: torch.Tensor, staleness: torch.Tensor | None
) -> torch.Tensor:
    """[T] proximal policy between behaviour and current policy, detached (A-3PO).

    log p_prox = a * log p_rollout + (1 - a) * log p with a = 1 / staleness, 0 for a fresh token: the fresher the
    token, the nearer to the current policy. `staleness` None: all fresh.
    """
    current = log_probs.detach()
    if staleness is None:
        return current
    share = torch.where(staleness >= 1, 1 / staleness.clamp(min=1), torch.zeros_like(staleness))
    # Where the share is 0 the engine's value may be anything.
    return torch.where(share > 0, share * rollout_log_probs + (1 - share) * current, current)
