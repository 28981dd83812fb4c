"""Discounted returns and generalised advantages over right-padded batches [B, T].

Called by estimator plugins. Both are the linear recurrence y_t = x_t + decay * y_{t+1}, run a chunk of columns at a
time: inside a chunk it is one matrix product, between chunks one number per row is carried. What a reader would
get wrong: padding must be zero on the way in (`pad_right` makes it so) and then is zero on the way out.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

CHUNK = 128
"""Columns per matrix product; THUDM/slime's chunk length."""


def pad_right(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """[length] tensors -> [B, longest], zeros at the right."""
    return torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True)


def unpad(padded: torch.Tensor, lengths: Sequence[int]) -> list[torch.Tensor]:
    """Inverse of `pad_right`."""
    return [row[:length] for row, length in zip(padded, lengths)]


def reverse_scan(values: torch.Tensor, decay: float, chunk_size: int = CHUNK) -> torch.Tensor:
    """y_t = x_t + decay * y_{t+1} along the last axis of [B, T]; y_T = 0."""
    if values.ndim != 2:
        raise ValueError(f"expected [batch, tokens], got shape {tuple(values.shape)}")
    if chunk_size < 1:
        raise ValueError(f"chunk_size {chunk_size}: must be at least 1")
    steps = torch.arange(min(chunk_size, values.shape[1]), device=values.device)
    gaps = (steps[None, :] - steps[:, None]).clamp(min=0).to(values.dtype)
    # weights[i, j] = decay^(j - i) for j >= i: what x_j adds to y_i.
    weights = torch.triu(torch.pow(torch.full_like(gaps, decay), gaps))
    out = torch.empty_like(values)
    carry = values.new_zeros(values.shape[0])
    for end in range(values.shape[1], 0, -chunk_size):
        start = max(end - chunk_size, 0)
        size = end - start
        chunk = values[:, start:end] @ weights[:size, :size].T
        reach = decay * weights[:size, size - 1]
        out[:, start:end] = chunk + carry[:, None] * reach[None, :]
        carry = out[:, start]
    return out


def discounted_returns(rewards: torch.Tensor, gamma: float, chunk_size: int = CHUNK) -> torch.Tensor:
    """R_t = r_t + gamma * R_{t+1}, [B, T] -> [B, T]."""
    return reverse_scan(rewards, gamma, chunk_size)


def gae(
    rewards: torch.Tensor, values: torch.Tensor, gamma: float, lambd: float, chunk_size: int = CHUNK
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalised advantage estimation (Schulman et al., 2016).

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
    following = torch.nn.functional.pad(values[:, 1:], (0, 1))
    advantages = reverse_scan(rewards + gamma * following - values, gamma * lambd, chunk_size)
    return advantages, advantages + values
