"""The engine's forward pass for `--true-on-policy-mode`: `models.batch_invariant` over the arenas of the KV cache.

Replaces `ModelRunner` in the core. It keeps a second copy of the weights, in the trainer's own module, since the fused
tensors of `FusedWeights` would add in another order.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from slime_core.models.config import ModelConfig
from slime_embedded.engine.kv_cache import Arena
from slime_embedded.engine.model_runner import DecodeBatch, note_routed
from slime_embedded.engine.sequence import Sequence
from slime_embedded.engine.weights import FusedWeights
from slime_embedded.models.batch_invariant import (
    TILE,
    BatchInvariantForward,
    attend_tiles,
    key_span,
    log_probs_of,
)
from slime_embedded.models.decoder import Decoder
from slime_embedded.models.routing import Routing

_Row = tuple[Arena, int, int]
"""A token's place: arena, row, position."""


class InvariantRunner:
    """Runner with `ModelRunner`'s methods that computes in fixed shapes."""

    def __init__(self, config: ModelConfig, weights: FusedWeights, device: torch.device) -> None:
        self.config, self.device = config, device
        self.dtype = self.kv_dtype = torch.float32
        self.routed: torch.Tensor | None = None
        """Experts used in the last forward pass, as in `ModelRunner.routed`."""
        self._weights = weights
        decoder = Decoder.from_weights(config, weights.named(), device).requires_grad_(False)
        self._forward = BatchInvariantForward(decoder)

    @torch.inference_mode()
    def weights_changed(self) -> None:
        """Copy the new weights."""
        self._forward.decoder.load_state_dict(dict(self._weights.named()))

    def tensors(self) -> list[torch.Tensor]:
        """Return the runner's copies of the weights."""
        return list(self._forward.decoder.parameters())

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [T, vocab] of hidden states [T, hidden]."""
        return self._forward.logits(hidden)

    def score_tokens(self, logits: torch.Tensor, tokens: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Return log-probs [n] of `tokens` [n] under `logits` [n, vocab] divided by temperatures `scales` [n, 1]."""
        return log_probs_of(logits, tokens, scales)

    def prefill(self, sequences: Seq[Sequence], starts: Seq[int]) -> list[torch.Tensor]:
        """See `ModelRunner.prefill`."""
        states = []
        for sequence, start in zip(sequences, starts):
            assert sequence.arena is not None
            rows = [(sequence.arena, sequence.row, p) for p in range(start, len(sequence.tokens))]
            states.append(self.states(torch.tensor(sequence.tokens[start:], device=self.device), rows))
            note_routed(self.routed, [(sequence, start, len(sequence.tokens))])
        return states

    def decode_batch(self, arenas: Seq[Arena]) -> DecodeBatch:
        """Return the running sequences as a batch."""
        return _InvariantBatch(self, arenas)

    def states(self, tokens: torch.Tensor, rows: Seq[_Row]) -> torch.Tensor:
        """Store keys and values of `tokens` [T] at `rows`; return their final hidden states [T, hidden]."""
        positions = torch.tensor([position for _, _, position in rows], device=self.device)
        tiles = _tiles(rows)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            for i, (arena, row, position) in enumerate(rows):
                arena.kv[layer, 0, row, :, position], arena.kv[layer, 1, row, :, position] = k[i], v[i]
            out = torch.empty(len(rows), q.shape[1] * q.shape[2], device=self.device)
            for span, members in tiles.items():
                self._attend_span(layer, span, members, rows, q, out)
            return out

        routing = None if self.config.moe is None else Routing(None)
        hidden = self._forward.hidden(tokens, positions, attend, routing)
        if routing is not None and self.config.moe is not None:
            self.routed = routing.used(len(rows), self.config.num_layers, self.config.moe.experts_per_token)
        return hidden

    def _attend_span(
        self, layer: int, span: int, members: list[list[int]], rows: Seq[_Row], q: torch.Tensor, out: torch.Tensor
    ) -> None:
        config = self.config
        queries = q.new_zeros(len(members), TILE, *q.shape[1:])
        last = torch.zeros(len(members), TILE, dtype=torch.long, device=self.device)
        both = q.new_zeros(2, len(members), span, config.num_kv_heads, config.head_dim)
        for i, tile in enumerate(members):
            arena, row, _ = rows[tile[0]]
            held = min(span, arena.capacity)
            both[:, i, :held] = arena.kv[layer, :, row, :, :held].transpose(1, 2)
            queries[i, : len(tile)] = q[tile]
            last[i, : len(tile)] = torch.tensor([rows[t][2] for t in tile], device=self.device)
        attended = attend_tiles(queries, both[0], both[1], last, self._forward.scale)
        for i, tile in enumerate(members):
            out[tile] = attended[i, : len(tile)]


def _tiles(rows: Seq[_Row]) -> dict[int, list[list[int]]]:
    """Map each number of keys to tiles of at most TILE tokens of the same sequence that attend to so many keys."""
    tiles: dict[int, list[list[int]]] = {}
    before: tuple[int, int, int] | None = None
    for i, (arena, row, position) in enumerate(rows):
        key = (id(arena), row, key_span(position))
        members = tiles.setdefault(key[2], [])
        if key != before or len(members[-1]) == TILE:
            members.append([])
        members[-1].append(i)
        before = key
    return tiles


class _InvariantBatch(DecodeBatch):
    def __init__(self, runner: InvariantRunner, arenas: Seq[Arena]) -> None:
        super().__init__(runner.device, arenas)
        self._runner = runner

    def run(self) -> torch.Tensor:
        rows = [(s.arena, s.row, len(s.tokens) - 1) for s in self.sequences if s.arena is not None]
        return self._runner.logits(self._runner.states(self.tokens, rows))
