"""Divergences of a policy p from a teacher q whose probabilities are known for a few tokens only.

Each divergence is a sum over the vocabulary of terms g(p_v, q_v) >= 0 that are 0 where p_v = q_v:

    reverse_kl   KL(p || q)    g = p log(p / q) - p + q
    forward_kl   KL(q || p)    g = q log(q / p) - q + p
    jsd          b KL(q || m) + (1 - b) KL(p || m),  m = b q + (1 - b) p    (GKD: Agarwal et al., arXiv 2306.13649)

-p + q adds up to 0 over the vocabulary. On a part K of it these are the terms of a generalised KL divergence: without
-p + q a sum over K may be negative, and is not least where p = q (modelscope/ms-swift #10079, after MOPD, arXiv
2606.30406). The rest of the vocabulary is

    sampled   [y not in K] g(p_y, q_y) / b_y for the sampled token y, with b_y its probability when it was sampled. The
              mean over y ~ b is the sum of g outside K, for the value and for the gradient, whatever p is.
    bucket    g(1 - sum_K p, 1 - sum_K q): all other tokens as one. A lower bound of the divergence.
    drop      0, MOPD's sum over K alone.
"""

from __future__ import annotations

import torch

_SMALLEST = -100.0
"""Least log-prob of a teacher: a token of probability 0 has a large term, not an infinite one."""
_LARGEST = 60.0
"""Largest log of a ratio to the probability with which a token was sampled; float32 ends at 88."""


def terms(log_p: torch.Tensor, log_q: torch.Tensor, divergence: str, beta: float = 0.5) -> torch.Tensor:
    """Return g for log-probs of any shape; `log_p` carries the gradient."""
    return _scaled(log_p, log_q.clamp(min=_SMALLEST), torch.zeros_like(log_q), divergence, beta)


def _scaled(
    log_p: torch.Tensor, log_q: torch.Tensor, log_b: torch.Tensor, divergence: str, beta: float
) -> torch.Tensor:
    """Return g(p, q) / b, of ratios to b, so that small probabilities keep their digits."""
    p, q = ((column - log_b).clamp(max=_LARGEST).exp() for column in (log_p, log_q))
    gap = log_p - log_q
    if divergence == "reverse_kl":
        return p * gap - p + q
    if divergence == "forward_kl":
        return -q * gap - q + p
    # log of m, with a gradient to p
    weights = torch.tensor([beta, 1 - beta], dtype=log_p.dtype, device=log_p.device).log()
    log_m = torch.logaddexp(log_q + weights[0], log_p + weights[1])
    return beta * q * (log_q - log_m) + (1 - beta) * p * (log_p - log_m)


def estimate(
    log_p: torch.Tensor,
    log_q: torch.Tensor,
    log_p_sampled: torch.Tensor,
    log_q_sampled: torch.Tensor,
    log_b_sampled: torch.Tensor,
    known: torch.Tensor,
    has_sampled: torch.Tensor,
    *,
    divergence: str,
    beta: float = 0.5,
    tail: str = "sampled",
) -> torch.Tensor:
    """Return the estimate of the divergence at each token, [T].

    Args:
        log_p: [T, k] log-probs of the policy at the ids that the teacher names; they carry the gradient.
        log_q: [T, k] log-probs of the teacher at these ids.
        log_p_sampled: [T] log-probs of the policy at the sampled token, with gradient.
        log_q_sampled: [T] log-probs of the teacher at it.
        log_b_sampled: [T] log-probs with which it was sampled.
        known: [T, k] False for ids that are missing.
        has_sampled: [T] True where the sampled token is among the ids.
        divergence: Name of the divergence.
        beta: Weight of the teacher in the mixture of jsd.
        tail: How the other tokens count.
    """
    nowhere = torch.full_like(log_q, _SMALLEST)
    log_p, log_q = torch.where(known, log_p, nowhere), torch.where(known, log_q, nowhere)
    total = torch.where(known, terms(log_p, log_q, divergence, beta), torch.zeros_like(log_q)).sum(-1)
    if tail == "bucket":
        return total + terms(_log_rest(log_p, known), _log_rest(log_q, known), divergence, beta)
    if tail == "sampled":
        # A token among the ids counts there: a teacher that agrees with the policy adds a term and a gradient of 0.
        same, log_q_sampled = log_p_sampled.detach(), log_q_sampled.clamp(min=_SMALLEST)
        log_q_sampled, log_b_sampled = (torch.where(has_sampled, same, x) for x in (log_q_sampled, log_b_sampled))
        return total + _scaled(log_p_sampled, log_q_sampled, log_b_sampled, divergence, beta)
    return total


def _log_rest(log_probs: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
    """Return the log of the probability that is left, at least the rounding of a sum that is 1."""
    kept = torch.where(known, log_probs.exp(), torch.zeros_like(log_probs)).sum(-1)
    return torch.log1p(-kept.clamp(max=1 - torch.finfo(kept.dtype).eps))
