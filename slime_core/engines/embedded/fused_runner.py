"""The forward pass of a small dense model in float32 on a CPU: all layers in one call of `kernels/decode.c`.

Takes the place of `ModelRunner` in the core where `kernels_for` finds that possible. A token's hidden states depend on
its own sequence only, to the bit: not on what runs beside it, nor on how its prompt was cut or cached.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_left
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate

import torch

from slime_core.engines.embedded.kv_cache import Arena
from slime_core.engines.embedded.model_runner import DecodeBatch, ModelRunner
from slime_core.engines.embedded.sequence import Sequence
from slime_core.engines.embedded.weights import FeedForward, FusedWeights
from slime_core.kernels import load
from slime_core.models.config import ModelConfig

_CHUNK, _LANES = 96, 16
"""CHUNK and the most LANES of the source."""
_LARGEST = 1 << 26
"""Weights up to which threads share the rows of a batch; in torch, which takes more, they share each product."""
_ROWS = 16
"""Least rows for one more thread."""


def kernels_for(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> ctypes.CDLL | None:
    """The compiled source, if it knows all that the model has."""
    heads, dim, hidden, inner = config.num_heads, config.head_dim, config.hidden_size, config.intermediate_size
    size = config.num_layers * hidden * ((heads + config.num_kv_heads) * 2 * dim + 3 * inner)
    if device.type != "cpu" or dtype != torch.float32 or config.moe is not None or size > _LARGEST:
        return None
    return None if any(width % _LANES for width in (dim, hidden, inner)) else load("decode")


class FusedBatch(DecodeBatch):
    """`DecodeBatch` that keeps where each row lies."""

    def _prepare(self, arenas: Seq[Arena], lengths: list[int]) -> None:
        assert isinstance(self._runner, FusedRunner)
        self._fused = self._runner
        self._places = self._fused.places(self.sequences, [length - 1 for length in lengths])

    def run(self) -> torch.Tensor:
        """Logits [B, vocab] of the next tokens."""
        return self._fused.logits(self._fused.states(self.tokens, self._places, range(1, len(self.tokens) + 1)))

    def advance(self, tokens: torch.Tensor) -> None:
        """Make `tokens` [B] the inputs of the next step."""
        self.tokens = tokens
        self._places[:, 3] += 1
        self.steps_left -= 1


class FusedRunner(ModelRunner):
    """`ModelRunner` with another way from tokens to hidden states."""

    def __init__(self, config: ModelConfig, weights: FusedWeights, kernels: ctypes.CDLL) -> None:
        super().__init__(config, weights, torch.device("cpu"), torch.float32)
        self._kernels, self._pool = kernels, ThreadPoolExecutor(thread_name_prefix="slime-decode")
        heads, kv, dim, inner = config.num_heads, config.num_kv_heads, config.head_dim, config.intermediate_size
        self._sizes = torch.tensor([config.num_layers, config.hidden_size, heads, kv, dim, inner])
        self._room = _CHUNK * (config.hidden_size + 2 * (heads + kv) * dim + 3 * inner)
        """Numbers on their way through a layer."""
        self.weights_changed()

    def weights_changed(self) -> None:
        """Look where they are now."""
        parts: list[torch.Tensor | None] = [self.weights.embedding, self.weights.final_norm]
        for layer in self.weights.layers:
            assert isinstance(layer.mlp, FeedForward)
            up, down = layer.mlp.gate_up, layer.mlp.down
            parts += [layer.input_norm, layer.qkv.tiles, layer.qkv.bias, layer.qk_norm, layer.o.tiles, layer.o.bias]
            parts += [layer.mlp_norm, up.tiles, up.bias, down.tiles, down.bias]
        self._pointers = torch.tensor([0 if part is None else part.data_ptr() for part in parts])

    def decode_batch(self, arenas: Seq[Arena]) -> DecodeBatch:
        """The running sequences as one batch."""
        return FusedBatch(self, arenas)

    def prefill(self, sequences: Seq[Sequence], starts: Seq[int]) -> list[torch.Tensor]:
        """See `ModelRunner.prefill`."""
        tokens = torch.tensor([t for s, start in zip(sequences, starts) for t in s.tokens[start:]])
        counts = [len(s.tokens) - start for s, start in zip(sequences, starts)]
        places = self.places(sequences, starts).repeat_interleave(torch.tensor(counts), dim=0)
        places[:, 3] += torch.cat([torch.arange(count) for count in counts])
        return list(self.states(tokens, places, list(accumulate(counts))).split(counts))

    def places(self, sequences: Seq[Sequence], positions: Seq[int]) -> torch.Tensor:
        """[n, 4] where tokens at `positions` are stored, as the source has it."""
        places = []
        for sequence, position in zip(sequences, positions):
            arena = sequence.arena
            assert arena is not None
            head = arena.capacity * self.config.head_dim
            row = head * self.config.num_kv_heads
            places.append((arena.kv.data_ptr() + 4 * sequence.row * row, arena.num_rows * row, head, position))
        return torch.tensor(places)

    def states(self, tokens: torch.Tensor, places: torch.Tensor, ends: Seq[int]) -> torch.Tensor:
        """Final hidden states [T, hidden] of `tokens` [T], stored at `places` [T, 4]; a sequence's end at one of `ends`."""
        total, longest = len(tokens), int(places[:, 3].max()) + 1
        rotations, states = self.rotations(longest), torch.empty(total, self.config.hidden_size)
        parts = max(1, min(torch.get_num_threads(), total // _ROWS))
        cuts = sorted({0, total, *(ends[bisect_left(ends, total * i // parts)] for i in range(1, parts))})

        def through(start: int, stop: int) -> None:
            room = torch.empty(self._room + 4 * (longest + _LANES))
            self._kernels.forward(
                self._sizes.data_ptr(), self.config.rms_norm_eps, self._scale, self._pointers.data_ptr(), stop - start,
                tokens[start:].data_ptr(), places[start:].data_ptr(), rotations.data_ptr(), room.data_ptr(),
                states[start:].data_ptr(),
            )  # fmt: skip

        if len(cuts) == 2:
            through(0, total)
        else:
            list(self._pool.map(through, cuts, cuts[1:]))
        return states
