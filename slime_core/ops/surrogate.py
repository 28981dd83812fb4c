"""Per-token policy and value objectives, to be minimised: PPO's clip, dual clip, CISPO, clipped value loss.

Called by estimators' `policy_loss`. All inputs and outputs are [T]; nothing is masked or reduced here. `ppo_kl` is old
minus new, so ratio = exp(-ppo_kl).
"""

from __future__ import annotations

import torch

from slime_core.ops.ratios import ratio_from_kl


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


def cispo_surrogate(
    ppo_kl: torch.Tensor,
    log_probs: torch.Tensor,
    advantages: torch.Tensor,
    eps_clip: float,
    eps_clip_high: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """-stopgrad(clip(ratio)) * A * log p: every token keeps its gradient (MiniMax-M1's CISPO).

    Returns:
        Loss, and 1.0 where the ratio was clipped (detached).
    """
    ratio = ratio_from_kl(ppo_kl).detach()
    high = eps_clip if eps_clip_high is None else eps_clip_high
    clipped = ratio.clamp(1 - eps_clip, 1 + high)
    return -clipped * advantages * log_probs, (clipped != ratio).to(ratio.dtype)


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
