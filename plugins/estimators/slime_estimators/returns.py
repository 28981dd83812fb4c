"""Discounted returns and generalised advantages over right-padded batches [B, T] or lists of responses.

Called by estimator plugins. Both are the linear recurrence y_t = x_t + decay * y_{t+1}, computed a chunk of columns at
a time: one matrix product inside a chunk, and one carried number per row between chunks. Input padding must be zero
(`pad_right` pads with zeros); output padding is then zero.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slime_core.ops import masked

__all__ = ["discounted_returns", "gae", "masked_gae", "pad_right", "reverse_scan", "token_rewards", "unpad"]

_CHUNK = 128
"""Columns per matrix product; THUDM/slime's chunk length."""


def pad_right(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Pad [length] tensors with zeros at the right to [B, longest]."""
    return torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True)


def unpad(padded: torch.Tensor, lengths: Sequence[int]) -> list[torch.Tensor]:
    """Return the [length] tensors of a padded batch; the inverse of `pad_right`."""
    return [row[:length] for row, length in zip(padded, lengths)]


def reverse_scan(values: torch.Tensor, decay: float, chunk_size: int = _CHUNK) -> torch.Tensor:
    """Compute y_t = x_t + decay * y_{t+1} along the last axis of [B, T], in float64; y_T = 0."""
    if values.ndim != 2:
        raise ValueError(f"expected [batch, tokens], got shape {tuple(values.shape)}")
    if chunk_size < 1:
        raise ValueError(f"chunk_size {chunk_size}: must be at least 1")
    wide = values.double()
    steps = torch.arange(min(chunk_size, values.shape[1]), device=values.device)
    gaps = (steps[None, :] - steps[:, None]).clamp(min=0).double()
    # weights[i, j] = decay^(j - i) for j >= i: the factor of x_j in y_i.
    weights = torch.triu(torch.pow(torch.full_like(gaps, decay), gaps))
    out = torch.empty_like(wide)
    carry = wide.new_zeros(values.shape[0])
    for end in range(values.shape[1], 0, -chunk_size):
        start = max(end - chunk_size, 0)
        size = end - start
        chunk = wide[:, start:end] @ weights[:size, :size].T
        reach = decay * weights[:size, size - 1]
        out[:, start:end] = chunk + carry[:, None] * reach[None, :]
        carry = out[:, start]
    return out.to(values.dtype)


def discounted_returns(rewards: torch.Tensor, gamma: float, chunk_size: int = _CHUNK) -> torch.Tensor:
    """Compute R_t = r_t + gamma * R_{t+1}, [B, T] -> [B, T]."""
    return reverse_scan(rewards, gamma, chunk_size)


def gae(
    rewards: torch.Tensor, values: torch.Tensor, gamma: float, lambd: float, chunk_size: int = _CHUNK
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute generalised advantage estimation (Schulman et al., 2016).

    delta_t = r_t + gamma * V_{t+1} - V_t with V = 0 after the last token, A_t = delta_t + gamma * lambd * A_{t+1},
    R = A + V.

    Args:
        rewards: [B, T], zero-padded.
        values: [B, T], zero-padded, so that the value after a row's last token is 0.
        gamma: Discount.
        lambd: Mixing between one-step (0) and whole-return (1) advantages.
        chunk_size: Columns per matrix product.

    Returns:
        Advantages and returns, [B, T] each.
    """
    if rewards.shape != values.shape:
        raise ValueError(f"rewards {tuple(rewards.shape)} and values {tuple(values.shape)} differ in shape")
    wide = values.double()
    following = torch.nn.functional.pad(wide[:, 1:], (0, 1))
    advantages = reverse_scan(rewards + gamma * following - wide, gamma * lambd, chunk_size)
    return advantages.to(values.dtype), (advantages + wide).to(values.dtype)


def token_rewards(reward: float, kl: torch.Tensor, mask: torch.Tensor, kl_coef: float) -> torch.Tensor:
    """Return [T] rewards: -kl_coef * KL at unmasked tokens, plus `reward` at the last one; zeros if all are masked."""
    per_token = masked(-kl_coef * kl, mask)
    positions = mask.nonzero()
    if len(positions):
        per_token[positions[-1, 0]] += reward
    return per_token


def masked_gae(
    rewards: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    masks: Sequence[torch.Tensor],
    gamma: float,
    lambd: float,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Compute `gae` over the unmasked tokens of each response, as if the masked tokens did not exist.

    Only states in which the policy acts count: the last token before a tool's output is followed by the first token
    after it, whose value the recursion reads next. So tool output adds no discount, and its untrained values are never
    read. Without masked tokens the result equals `gae`.

    Args:
        rewards: [n] tensors of [response_length]; masked entries are ignored.
        values: The same shapes.
        masks: The same shapes, 0 or 1.
        gamma: Discount per unmasked token.
        lambd: Mixing between one-step (0) and whole-return (1) advantages.

    Returns:
        Advantages and returns in the shapes of the inputs; 0 at masked tokens.
    """
    if not rewards:
        return [], []
    chosen = [mask != 0 for mask in masks]
    shorter = [[part[keep] for part, keep in zip(column, chosen)] for column in (rewards, values)]
    found = gae(pad_right(shorter[0]), pad_right(shorter[1]), gamma, lambd)
    lengths = [len(part) for part in shorter[0]]
    advantages, returns = ([torch.zeros_like(part) for part in values] for _ in range(2))
    for target, padded in ((advantages, found[0]), (returns, found[1])):
        for part, keep, result in zip(target, chosen, unpad(padded, lengths)):
            part[keep] = result
    return advantages, returns
