"""The forward pass of a small dense model in float32 on a CPU: all layers in one call of `kernels/decode.c`.

Replaces `ModelRunner` in the core if `kernels_for` returns kernels. A token's hidden states depend bit for bit on its
own sequence only: not on the other sequences of the batch, nor on how its prompt was split or cached.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence as Seq

import torch

from slime_core.models.config import ModelConfig
from slime_embedded.engine.kv_cache import Arena
from slime_embedded.engine.model_runner import DecodeBatch, ModelRunner
from slime_embedded.engine.sequence import Sequence
from slime_embedded.engine.weights import FeedForward, FusedWeights
from slime_embedded.kernels import load

_CHUNK, _LANES = 96, 16
"""CHUNK and the most LANES of the source."""


def kernels_for(config: ModelConfig, device: torch.device, dtype: torch.dtype, invariant: bool) -> ctypes.CDLL | None:
    """Return the compiled source if it supports the model, else None; like the trainer's kernels it uses one thread."""
    widths = (config.head_dim, config.hidden_size, config.intermediate_size)
    if device.type != "cpu" or dtype != torch.float32 or config.moe is not None or torch.get_num_threads() > 1:
        return None
    return None if invariant or any(width % _LANES for width in widths) else load("decode")


class _FusedBatch(DecodeBatch):
    """A `DecodeBatch` that keeps the place of each row."""

    def __init__(self, runner: FusedRunner, arenas: Seq[Arena]) -> None:
        super().__init__(runner.device, arenas)
        self._runner, self._places = runner, runner.places(self.sequences, [len(s.tokens) - 1 for s in self.sequences])

    def run(self) -> torch.Tensor:
        """Return logits [B, vocab] of the next tokens."""
        self._places[:, 3] = self.positions
        return self._runner.logits(self._runner.states(self.tokens, self._places))


class FusedRunner(ModelRunner):
    """A `ModelRunner` that computes hidden states with the fused kernel."""

    def __init__(self, config: ModelConfig, weights: FusedWeights, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(config, weights, device, dtype)
        heads, kv, dim, inner = config.num_heads, config.num_kv_heads, config.head_dim, config.intermediate_size
        self._sizes = torch.tensor([config.num_layers, config.hidden_size, heads, kv, dim, inner])
        self._room = _CHUNK * (config.hidden_size + 2 * (heads + kv) * dim + 3 * inner)
        """Number of intermediate values in a layer."""
        self.weights_changed()

    def weights_changed(self) -> None:
        """Update the addresses of the weights."""
        parts: list[torch.Tensor | None] = [self.weights.embedding, self.weights.final_norm]
        for layer in self.weights.layers:
            assert isinstance(layer.mlp, FeedForward)
            up, down = layer.mlp.gate_up, layer.mlp.down
            parts += [layer.input_norm, layer.qkv.packed, layer.qkv.bias, layer.qk_norm, layer.o.packed, layer.o.bias]
            parts += [layer.mlp_norm, up.packed, up.bias, down.packed, down.bias]
        self._pointers = torch.tensor([0 if part is None else part.data_ptr() for part in parts])

    def decode_batch(self, arenas: Seq[Arena]) -> DecodeBatch:
        """Return the running sequences as one batch."""
        return _FusedBatch(self, arenas)

    def prefill(self, sequences: Seq[Sequence], starts: Seq[int]) -> list[torch.Tensor]:
        """Compute prompts; see `ModelRunner.prefill`."""
        tokens = torch.tensor([t for s, start in zip(sequences, starts) for t in s.tokens[start:]])
        counts = [len(s.tokens) - start for s, start in zip(sequences, starts)]
        places = self.places(sequences, starts).repeat_interleave(torch.tensor(counts), dim=0)
        places[:, 3] += torch.cat([torch.arange(count) for count in counts])
        return list(torch.split(self.states(tokens, places), counts))

    def places(self, sequences: Seq[Sequence], positions: Seq[int]) -> torch.Tensor:
        """Return [n, 4] places of the tokens at `positions` in the key-value cache, in the format of the source."""
        places = []
        for sequence, position in zip(sequences, positions):
            arena = sequence.arena
            assert arena is not None
            head = arena.capacity * self.config.head_dim
            row = head * self.config.num_kv_heads
            places.append((arena.kv.data_ptr() + 4 * sequence.row * row, arena.num_rows * row, head, position))
        return torch.tensor(places)

    def states(self, tokens: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Return final hidden states [T, hidden] of `tokens` [T], whose keys and values go to `places` [T, 4]."""
        longest = int(places[:, 3].max()) + 1
        rotations, states = self.rotations(longest), torch.empty(len(tokens), self.config.hidden_size)
        room = torch.empty(self._room + 4 * (longest + _LANES))
        given = [t.data_ptr() for t in (self._sizes, self._pointers, tokens, places, rotations, room, states)]
        self.weights.kernels.forward(*given, len(tokens), self.config.rms_norm_eps, self._scale)
        return states
