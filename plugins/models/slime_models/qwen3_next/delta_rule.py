"""The two operations of gated linear attention that look back in a sequence, over packed sequences, in plain torch.

`linear_attention.GatedDeltaNet` calls them. Tensors hold the tokens of all sequences one after another, `lengths` says
where one ends: nothing passes from one sequence to the next.

The rule (Yang, Kautz, Hatamizadeh, "Gated Delta Networks", 2024, equation 10) keeps a [key_dim, value_dim] state per
head and sequence: S_t = exp(decay_t) (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T, and reads o_t = S_t^T q_t.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional


def causal_conv(tokens_TC: Tensor, weight_CK: Tensor, lengths: Sequence[int]) -> Tensor:
    """A convolution of every channel over the last K tokens of its sequence, zeros before its start.

    Args:
        tokens_TC: [tokens, channels].
        weight_CK: [channels, K]; the last column weighs the token itself.
        lengths: Tokens of each sequence; they add up to T.

    Returns:
        [tokens, channels].
    """
    channels, taps = weight_CK.shape
    gap = taps - 1
    counts = torch.tensor(lengths, device=tokens_TC.device)
    # Before every sequence a gap of zeros: token t of sequence number s (from 0) moves to t + gap * (s + 1).
    sequence = torch.repeat_interleave(torch.arange(len(lengths), device=tokens_TC.device), counts)
    moved = torch.arange(tokens_TC.shape[0], device=tokens_TC.device) + gap * (sequence + 1)
    spaced = tokens_TC.new_zeros(tokens_TC.shape[0] + gap * len(lengths), channels).index_copy(0, moved, tokens_TC)
    found = functional.conv1d(spaced.T[None], weight_CK[:, None], groups=channels)[0].T
    return found.index_select(0, moved - gap)


def gated_delta_rule(
    query_THD: Tensor,
    key_THD: Tensor,
    value_THV: Tensor,
    decay_TH: Tensor,
    beta_TH: Tensor,
    lengths: Sequence[int],
    *,
    chunk_size: int = 64,
) -> Tensor:
    """The gated delta rule, chunk by chunk: within a chunk by matrix products, from chunk to chunk by the state.

    Queries and keys are normalised to length one and queries scaled by key_dim ** -0.5. Computed in float32 or the
    inputs' precision, whichever is more.

    Args:
        query_THD: [tokens, heads, key_dim].
        key_THD: [tokens, heads, key_dim].
        value_THV: [tokens, heads, value_dim].
        decay_TH: [tokens, heads], logarithms, at most 0.
        beta_TH: [tokens, heads], how far a token overwrites what its key had, 0 to 1.
        lengths: Tokens of each sequence; they add up to T.
        chunk_size: Tokens per chunk: a matter of speed.

    Returns:
        [tokens, heads, value_dim], in the precision of the computation.
    """
    precision = torch.promote_types(query_THD.dtype, torch.float32)
    chunks_of_step, slots = _chunks(lengths, chunk_size, query_THD.device)
    number = sum(chunks_of_step)

    def chunked(tokens: Tensor) -> Tensor:
        """[T, H, ...] -> [chunks, H, chunk_size, ...]; what pads a chunk is zero: it neither writes nor decays."""
        table = tokens.new_zeros(number * chunk_size, *tokens.shape[1:], dtype=precision)
        table = table.index_copy(0, slots, tokens.to(precision))
        return table.view(number, chunk_size, *tokens.shape[1:]).transpose(1, 2).contiguous()

    query, key = (chunked(_unit(x.to(precision))) for x in (query_THD, key_THD))
    query = query * query.shape[-1] ** -0.5
    value, beta, decay = chunked(value_THV), chunked(beta_TH)[..., None], chunked(decay_TH).cumsum(-1)

    # between[..., i, j] = what is left at token i of what token j wrote, j <= i.
    above = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=query.device).triu(1)
    between = (decay[..., :, None] - decay[..., None, :]).masked_fill(above, -torch.inf).exp()
    since_start = decay.exp()[..., None]
    # Token i writes beta_i (v_i - what its key reads), which depends on what the earlier tokens of the chunk wrote: a
    # triangular system for all writes, linear in the values and in what the keys read from the state before.
    system = (beta * key) @ key.transpose(-1, -2) * between
    wanted = torch.cat([beta * value, beta * key * since_start], -1)
    solved = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    writes, reads = solved.split([value.shape[-1], key.shape[-1]], -1)
    scores = query @ key.transpose(-1, -2) * between
    query = query * since_start
    key = key * (decay[..., -1:] - decay).exp()[..., None]
    whole = decay[..., -1].exp()[..., None, None]

    state = value.new_zeros(chunks_of_step[0] if chunks_of_step else 0, *key.shape[1:2], key.shape[-1], value.shape[-1])
    outputs, start = [], 0
    for active in chunks_of_step:
        now = slice(start, start + active)
        state = state[:active]  # the others have ended
        new = writes[now] - reads[now] @ state
        outputs.append(query[now] @ state + scores[now] @ new)
        state = state * whole[now] + key[now].transpose(-1, -2) @ new
        start += active
    if not outputs:
        return value_THV.to(precision)
    return torch.cat(outputs).transpose(1, 2).flatten(0, 1).index_select(0, slots)


def _unit(vectors: Tensor) -> Tensor:
    """Length one along the last axis; epsilon as in the model's own kernels."""
    return vectors * torch.rsqrt(vectors.square().sum(-1, keepdim=True) + 1e-6)


def _chunks(lengths: Sequence[int], size: int, device: torch.device) -> tuple[list[int], Tensor]:
    """Cut sequences into chunks and order these by step: first chunks of all sequences, then second ones, ...

    Longer sequences stand first within a step, so that those which go on are the first of the next step too.

    Returns:
        How many chunks each step has, and [tokens] the place of each token in the table of chunks.
    """
    counts = torch.tensor(lengths, dtype=torch.long)
    longest_first = counts.argsort(descending=True, stable=True)
    rank = torch.empty_like(longest_first)
    rank[longest_first] = torch.arange(len(lengths))
    steps = (int(counts.max()) + size - 1) // size if len(lengths) else 0
    of_step = [int((counts > step * size).sum()) for step in range(steps)]
    first = torch.tensor([0, *accumulate(of_step)], dtype=torch.long)
    position = torch.arange(int(counts.sum())) - torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    chunk = first[position // size] + torch.repeat_interleave(rank, counts)
    return of_step, (chunk * size + position % size).to(device)
