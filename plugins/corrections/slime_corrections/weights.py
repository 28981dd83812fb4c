"""Importance weights by level and bounds, and rejection, on plain tensors.

Layout: response tokens of several samples laid end to end, [T]; nothing carries a gradient. A "sequence" weight is the
product of the token ratios (unbiased, of high variance), a "geometric" one their geometric mean; both are repeated over
the sequence's tokens.

Sources: truncation, Yao et al., "Your efficient RL framework secretly brings you off-policy RL training" (2025);
masking, sequence levels and vetoes, Liu et al., "When speed kills stability" (2025) and THUDM/slime's MIS example.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from slime_core.errors import ConfigError
from slime_core.ops import expand_to_tokens, masked, segment_means, segment_sums

AllReduce = Callable[[torch.Tensor], torch.Tensor]
"""Sum over data-parallel ranks."""
LOG_RATIO_LIMIT = 20.0
"""Log ratios are bounded by it, as in the core."""
LEVELS = ("token", "sequence", "geometric")
MODES = ("truncate", "clip", "mask")
TRUST_REGIONS = ("max", "avg")


def importance_at(log_ratio: torch.Tensor, mask: torch.Tensor, lengths: Sequence[int], level: str) -> torch.Tensor:
    """[T] exp of the log ratio at a level, the exponent bounded by +-20.

    Args:
        log_ratio: [T] trainer minus engine.
        mask: [T] 0 or 1; masked tokens take no part in a sequence's weight.
        lengths: [n] tokens of each sample.
        level: "token", "sequence" (sum over the sequence) or "geometric" (mean over the sequence).

    Raises:
        ConfigError: Unknown level.
    """
    if level == "sequence":
        log_ratio = expand_to_tokens(segment_sums(masked(log_ratio, mask), lengths), lengths)
    elif level == "geometric":
        log_ratio = expand_to_tokens(segment_means(log_ratio, mask, lengths), lengths)
    elif level != "token":
        raise ConfigError(f"correction level {level!r}: allowed: {', '.join(LEVELS)}")
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def bounded_weights(weights: torch.Tensor, mode: str, low: float, high: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights after a mode, and 1.0 for the tokens that stay in the loss, [T] each.

    Args:
        weights: [T] from `importance_at`.
        mode: "truncate" (at `high` only), "clip" (to both bounds) or "mask" (outside tokens leave the loss; the
            weights stay as they are).
        low: Lower bound.
        high: Upper bound.

    Raises:
        ConfigError: Unknown mode.
    """
    kept = torch.ones_like(weights)
    if mode == "truncate":
        return weights.clamp(max=high), kept
    if mode == "clip":
        return weights.clamp(low, high), kept
    if mode == "mask":
        return weights, inside(weights, low, high)
    raise ConfigError(f"correction mode {mode!r}: allowed: {', '.join(MODES)}")


def inside(weights: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """[T] 1.0 where low <= weight <= high."""
    return ((weights >= low) & (weights <= high)).to(weights.dtype)


def veto(log_ratio: torch.Tensor, mask: torch.Tensor, lengths: Sequence[int], threshold: float) -> torch.Tensor:
    """[T] 0.0 on every token of a sequence in which one unmasked token's ratio is below `threshold`, else 1.0."""
    below = (log_ratio < torch.tensor(threshold, dtype=torch.float64).log()).to(log_ratio.dtype)
    return expand_to_tokens((segment_sums(masked(below, mask), lengths) == 0).to(log_ratio.dtype), lengths)


def trust_region(
    log_ratio: torch.Tensor, mask: torch.Tensor, lengths: Sequence[int], kind: str, threshold: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rejection of sequences by an estimate of KL(engine || trainer), with r the log ratio.

    Args:
        log_ratio: [T] trainer minus engine.
        mask: [T].
        lengths: [n].
        kind: "max": the largest r^2 / 2 of the sequence's tokens; "avg": the mean of exp(r) - 1 - r.
        threshold: Sequences above it are rejected.

    Returns:
        1.0 where kept, and the estimate, [T] each.

    Raises:
        ConfigError: Unknown kind.
    """
    r = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    if kind == "max":
        parts = torch.split(masked(r.square() / 2, mask), list(lengths))
        found = torch.stack([p.max() if p.numel() else p.new_zeros(()) for p in parts]) if parts else r.new_zeros(0)
    elif kind == "avg":
        found = segment_means(torch.expm1(r) - r, mask, lengths)
    else:
        raise ConfigError(f"trust region {kind!r}: allowed: {', '.join(TRUST_REGIONS)}")
    value = expand_to_tokens(found, lengths)
    return (value <= threshold).to(r.dtype), value


def mean_weight(
    weights: torch.Tensor,
    mask: torch.Tensor,
    lengths: Sequence[int],
    level: str,
    all_reduce: AllReduce,
    sibling_counts: Sequence[int] | None = None,
) -> torch.Tensor:
    """Scalar mean of the weights over all ranks: over tokens at level "token", else over sequences.

    Sequences without an unmasked token do not count. 1 where nothing counts. `sibling_counts`, [n]: how many fan-out
    siblings each sequence has, itself included; it counts as that part of one, and a token as a token.
    """
    if level == "token":
        sums = torch.stack([masked(weights, mask).double().sum(), mask.double().sum()])
    else:
        shares = 1.0 / torch.tensor(sibling_counts or [1] * len(lengths), device=mask.device, dtype=torch.float64)
        present = (segment_sums(mask, lengths) > 0).double() * shares
        sums = torch.stack([(segment_means(weights, mask, lengths).double() * present).sum(), present.sum()])
    total, count = all_reduce(sums).unbind()
    return torch.where((count > 0) & (total > 0), total / count.clamp(min=1e-9), torch.ones_like(total))
