"""A decoder's forward pass with bit-identical results for a sequence, independent of the rest of the batch.

Floating-point sums depend on the order in which a kernel adds, and kernels choose that order by the shape of their
input. So nothing here depends on the shape of the batch: row-wise work runs on tiles of exactly `TILE` rows, and a
query at position p always attends over `key_span(p)` keys, the ones after p masked. The trainer (whole sequences,
packed) and the embedded engine (one new token at a time, cached keys) then agree bit for bit, which
`--true-on-policy-mode` requires. The idea is from "Defeating Nondeterminism in LLM Inference" (He et al., Thinking
Machines 2025). It requires that a matrix product treats all rows of a full tile alike. Tests check this, and the
learner checks it at every rollout by comparing the two sides.

Tiles are padded, so this is slower than `Decoder.hidden`; it is for runs that need exactness, not speed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from slime_embedded.models.decoder import Decoder, DecoderLayer
from slime_embedded.models.feed_forward import MixtureOfExperts
from slime_embedded.models.logprobs import SamplingMask
from slime_embedded.models.rope import rope_cos_sin
from slime_embedded.models.routing import Routing

TILE = 32
"""Number of rows in every row-wise computation."""
KEY_BLOCK = 64
"""Unit of key counts: each is a multiple of it."""
_SCORES = 1 << 24
"""Maximum number of attention scores computed at once."""

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer, rotated queries [T, Q, D], rotated keys [T, H, D], values [T, H, D]) -> [T, Q * D]."""


def key_span(position: int) -> int:
    """Return the number of keys over which a query at `position` (from 0) is computed."""
    return (position // KEY_BLOCK + 1) * KEY_BLOCK


def by_tile(
    function: Callable[..., tuple[torch.Tensor, ...]], *rows: torch.Tensor, width: int = TILE
) -> tuple[torch.Tensor, ...]:
    """Apply a row-wise function to tiles of `width` rows, the last one padded with zeros.

    Args:
        function: [width, ...] tensors -> tuple of [width, ...] tensors.
        rows: [T, ...] tensors.
        width: Rows of a tile.
    """
    total = rows[0].shape[0]
    missing = -total % width
    padded = [torch.cat((x, x.new_zeros(missing, *x.shape[1:]))) if missing else x for x in rows]
    outputs = [function(*(x[i : i + width] for x in padded)) for i in range(0, total + missing, width)]
    return tuple(torch.cat(parts)[:total] for parts in zip(*outputs, strict=True))


def attend_tiles(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, last: torch.Tensor, scale: float
) -> torch.Tensor:
    """Return the attention of tiles of queries, each over its own keys.

    Args:
        queries: [n, TILE, Q, D].
        keys: [n, S, H, D], S a multiple of `KEY_BLOCK`; finite also in unused places.
        values: Like `keys`.
        last: [n, TILE] the last key each query sees.
        scale: Factor of the scores.

    Returns:
        [n, TILE, Q * D].
    """
    step = max(1, _SCORES // (queries.shape[2] * TILE * keys.shape[1]))
    if queries.shape[0] > step:
        starts = range(0, queries.shape[0], step)
        parts = [[x[i : i + step] for x in (queries, keys, values, last)] for i in starts]
        return torch.cat([attend_tiles(q, k, v, seen, scale) for q, k, v, seen in parts])
    n, _, num_queries, dim = queries.shape
    span, num_keys = keys.shape[1:3]
    # [n * Q, rows, D]: keys and values repeated for the queries that share them, in the order of the query heads.
    q = queries.transpose(1, 2).reshape(-1, TILE, dim)
    k, v = (
        x.transpose(1, 2).repeat_interleave(num_queries // num_keys, 1).reshape(-1, span, dim) for x in (keys, values)
    )
    hidden = torch.arange(span, device=last.device) > last[:, :, None]
    scores = torch.bmm(q, k.transpose(1, 2)).mul(scale).view(n, num_queries, TILE, span)
    weights = torch.softmax(scores.masked_fill(hidden[:, None], float("-inf")), dim=-1)
    return torch.bmm(weights.view(-1, TILE, span), v).view(n, num_queries, TILE, dim).transpose(1, 2).flatten(2)


class BatchInvariantForward:
    """A forward pass of `decoder` in fixed shapes; differentiable."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.scale = decoder.config.head_dim**-0.5

    def hidden(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attend: Attend, routing: Routing | None = None
    ) -> torch.Tensor:
        """Return [T, hidden] after the final norm for [T] token ids at `positions` [T] of their sequences.

        `routing`: as for `Decoder.hidden`.
        """
        stack = self.decoder.model
        config, device = self.decoder.config, token_ids.device
        cos, sin = by_tile(lambda tile: rope_cos_sin(config, tile, device), positions)
        rope = (cos, sin)
        x = stack.embed_tokens(token_ids)
        for i, layer in enumerate(stack.layers):
            assert isinstance(layer, DecoderLayer)
            if self.decoder.recompute and torch.is_grad_enabled():
                x = checkpoint(
                    self._layer, i, layer, x, rope, attend, routing, use_reentrant=False, preserve_rng_state=False
                )
            else:
                x = self._layer(i, layer, x, rope, attend, routing)
        return by_tile(lambda tile: (stack.norm(tile),), x)[0]

    def packed(self, token_ids: torch.Tensor, lengths: Sequence[int], routing: Routing | None = None) -> torch.Tensor:
        """Return the hidden states like `hidden`, for complete sequences of `lengths`, concatenated."""
        tiles = SequenceTiles.of(lengths, token_ids.device)
        return self.hidden(token_ids, tiles.positions, tiles.attend(self.scale), routing)

    def _layer(
        self,
        number: int,
        layer: DecoderLayer,
        x: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        attend: Attend,
        routing: Routing | None,
    ) -> torch.Tensor:
        attention = layer.self_attn
        dim = attention.head_dim

        def project(tile: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
            tile = layer.input_layernorm(tile)
            q, k = attention.q_proj(tile).view(TILE, -1, dim), attention.k_proj(tile).view(TILE, -1, dim)
            return *attention.rotated(q, k, cos, sin), attention.v_proj(tile).view(TILE, -1, dim)

        def finish(tile: torch.Tensor, attended: torch.Tensor) -> tuple[torch.Tensor]:
            tile = tile + attention.o_proj(attended)
            return (tile + layer.mlp(layer.post_attention_layernorm(tile)),)

        def join(tile: torch.Tensor, attended: torch.Tensor) -> tuple[torch.Tensor, ...]:
            tile = tile + attention.o_proj(attended)
            return tile, layer.post_attention_layernorm(tile)

        attended = attend(number, *by_tile(project, x, *rope))
        if not isinstance(layer.mlp, MixtureOfExperts):
            return by_tile(finish, x, attended)[0]
        # The number of rows of an expert depends on the batch, so its rows fill tiles of their own.
        x, normed = by_tile(join, x, attended)
        at = None if routing is None else routing.of_layer(number, None)
        result: torch.Tensor = x + layer.mlp(
            normed, at, lambda function, rows: by_tile(lambda tile: (function(tile),), rows)[0]
        )
        return result

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [T, vocab] for `hidden` [T, hidden]."""
        weight = self.decoder.head_weight
        return by_tile(lambda tile: (functional.linear(tile, weight),), hidden)[0]

    def token_log_probs(
        self,
        hidden: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        *,
        with_entropy: bool = False,
        mask: SamplingMask | None = None,
        chunk_size: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return log-probs [T] of `targets` [T] after `hidden` [T, hidden], and the entropy [T] in nats if requested.

        `chunk_size` has no effect: rows are always processed a tile at a time.
        """
        weight = self.decoder.head_weight
        scales = hidden.new_full((hidden.shape[0], 1), temperature)

        def score(
            tile: torch.Tensor, ids: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
        ) -> tuple[torch.Tensor, ...]:
            logits = functional.linear(tile, weight)
            # A padding row has scale 0, and its 0 / 0 is dropped with it; 1 keeps its gradient finite.
            scores = _scaled_log_softmax(logits if bias is None else logits + bias, scale + (scale == 0))
            chosen = scores.gather(1, ids[:, None]).squeeze(1)
            finite = scores.clamp(min=torch.finfo(scores.dtype).min)  # 0 * -inf would be NaN
            return (chosen, -(scores.exp() * finite).sum(-1)) if with_entropy else (chosen,)

        if not hidden.shape[0]:
            empty = hidden.sum(-1)
            return empty, empty if with_entropy else None
        biases = []
        if mask is not None:
            zeros = hidden.new_zeros(hidden.shape[0], weight.shape[0])
            biases.append(mask.apply_(zeros, targets, slice(0, hidden.shape[0])))
        found = by_tile(score, hidden, targets, scales, *biases)
        return found[0], found[1] if with_entropy else None


def _scaled_log_softmax(logits: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(logits / scales, dim=-1)


def log_probs_of(logits: torch.Tensor, targets: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Log-probs [T] of `targets` under logits [T, vocab] divided by `scales` [T, 1]: as `token_log_probs` has them."""

    def score(tile: torch.Tensor, ids: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor]:
        return (_scaled_log_softmax(tile, scale + (scale == 0)).gather(1, ids[:, None]).squeeze(1),)

    return by_tile(score, logits, targets, scales)[0]


@dataclass(frozen=True)
class SequenceTiles:
    """Index tables for the attention of packed complete sequences, tile by tile; made once per forward pass."""

    positions: torch.Tensor
    """[T] position of each token in its sequence."""
    groups: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    """Per number of keys S: rows of the queries [n, TILE], rows of the keys [n, S], last key of each query [n, TILE].
    Row T stands for padding."""
    inverse: torch.Tensor
    """[T] index of each token's query in the tiles of all groups."""

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> SequenceTiles:
        """Return the tables for concatenated sequences of `lengths`."""
        total, start = sum(lengths), 0
        tiles: dict[int, list[tuple[int, int, int]]] = {}
        for length in lengths:
            for first in range(0, length, TILE):
                tiles.setdefault(key_span(first), []).append((start, first, length))
            start += length
        groups, order = [], []
        for span in sorted(tiles):
            starts, firsts, sizes = (torch.tensor(column)[:, None] for column in zip(*tiles[span], strict=True))
            places, keys = firsts + torch.arange(TILE), torch.arange(span).expand(len(tiles[span]), -1)
            queries = torch.where(places < sizes, starts + places, total)
            groups.append(
                (
                    queries.to(device),
                    torch.where(keys < sizes, starts + keys, total).to(device),
                    torch.where(places < sizes, places, 0).to(device),
                )
            )
            order.append(queries.flatten())
        rows = torch.cat(order)
        inverse = torch.empty(total + 1, dtype=torch.long)
        inverse[rows] = torch.arange(len(rows))
        positions = torch.cat([torch.arange(length) for length in lengths])
        return cls(positions.to(device), groups, inverse[:total].to(device))

    def attend(self, scale: float) -> Attend:
        """Return a function for causal attention within each sequence."""

        def attention(_: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            q, k, v = (torch.cat((x, x.new_zeros(1, *x.shape[1:]))) for x in (q, k, v))
            outputs = [
                attend_tiles(q[queries], k[keys], v[keys], last, scale).flatten(0, 1)
                for queries, keys, last in self.groups
            ]
            return torch.cat(outputs).index_select(0, self.inverse)

        return attention
