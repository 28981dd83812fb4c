"""Example functions for the policy loss: a correction between engine and trainer, a reducer, or a whole loss.

    slime train --config demo.yaml --use-tis --custom-tis-function-path examples/hooks/policy_loss.py
    slime train --config demo.yaml --custom-pg-loss-reducer-function-path examples/hooks/policy_loss.py
    slime train --config demo.yaml --loss-type custom_loss \
        --custom-loss-function-path examples/hooks/policy_loss.py

Functions see one micro-batch. A reducer must be a sum over samples, and a loss must reduce with `sum_of_sample_mean`,
so that results do not depend on how samples are split.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from slime_core.ops import response_log_probs


def tis_function(
    *,
    args: Any,
    pg_loss: torch.Tensor,
    train_log_probs: list[torch.Tensor],
    rollout_log_probs: list[torch.Tensor],
    loss_masks: list[torch.Tensor],
    total_lengths: list[int],
    response_lengths: list[int],
) -> tuple[torch.Tensor, list[torch.Tensor], dict[str, torch.Tensor]]:
    """Weigh tokens by trainer over engine probability, at most `--tis-clip`; mask them if it is outside (0.5, 2).

    `pg_loss` is [T], the others have a [response_length] tensor per sample; metrics are [T].
    """
    ratio = torch.exp(torch.cat(train_log_probs) - torch.cat(rollout_log_probs))
    agrees = (ratio > 0.5) & (ratio < 2.0)
    masks = [m * a for m, a in zip(loss_masks, torch.split(agrees.to(pg_loss.dtype), response_lengths))]
    return pg_loss * ratio.clamp(max=args.tis_clip), masks, {"my_ratio": ratio}


def pg_loss_reducer(
    total_lengths: list[int],
    response_lengths: list[int],
    loss_masks: list[torch.Tensor],
    calculate_per_token_loss: bool,
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the sum over a response's tokens / the square root of their number: between a mean and a sum."""

    def reduce(values: torch.Tensor) -> torch.Tensor:
        parts = torch.split(values, response_lengths)
        return sum(
            ((p * m).sum() / m.sum().clamp(min=1).sqrt() for p, m in zip(parts, loss_masks)), values.new_zeros(())
        )

    return reduce


def custom_loss(
    args: Any, batch: dict[str, Any], logits: torch.Tensor, sum_of_sample_mean: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute REINFORCE without ratio or clipping (Williams, 1992): -advantage * log p, [T] over all responses."""
    log_probs, entropies = response_log_probs(
        logits, batch["unconcat_tokens"], batch["response_lengths"], args.rollout_temperature, with_entropy=True
    )
    assert entropies is not None
    loss = sum_of_sample_mean(-torch.cat(batch["advantages"]) * torch.cat(log_probs))
    return loss, {"my_entropy": sum_of_sample_mean(torch.cat(entropies).detach())}
