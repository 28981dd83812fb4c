"""Compute logits for tokens of running sequences, with the fused weights and the KV cache.

The core calls `prefill` for new sequences and `decode` for running ones. Both pack all tokens of all sequences into
one [T, hidden] matrix for the projections and go through the arenas for attention. Few torch calls per layer matter
more than anything else for small models: a call costs as much as its arithmetic.

Legend: T tokens, n rows of an arena, Q query heads, H key/value heads, G = Q / H, D head_dim, S keys read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq

import torch
import torch.nn.functional as F

from slime_core.models.config import ModelConfig
from slime_embedded.engine.kv_cache import Arena
from slime_embedded.engine.sequence import Sequence
from slime_embedded.engine.weights import FusedWeights
from slime_embedded.models.rope import rope_cos_sin

Attend = Callable[[int, torch.Tensor], torch.Tensor]
"""Attention function: (layer, [T, Q + 2H, D] rotated queries, keys and values) -> [T, Q * D]."""

PREFILL_TOKENS = 2048
"""Largest number of tokens in one forward pass of a prefill."""
_MASK_ENTRIES = 1 << 25
"""Largest number of entries of a prefill's attention mask; long prompts are split into smaller pieces."""
_KEY_STEP = 8
"""Multiple to which the number of keys read is rounded up."""


class DecodeBatch:
    """Inputs of the decode steps while the running sequences stay the same; `advance` updates them."""

    def __init__(self, device: torch.device, arenas: Seq[Arena], order: list[Sequence] | None = None) -> None:
        self._arenas = [arena for arena in arenas if arena.sequences]
        self.sequences = order or [s for arena in arenas for s in arena.sequences]
        lengths = [len(s.tokens) for s in self.sequences]
        self.positions = torch.tensor([n - 1 for n in lengths], device=device)
        self.tokens = torch.tensor([s.tokens[-1] for s in self.sequences], device=device)
        self.steps_left = min(s.arena.capacity - n for s, n in zip(self.sequences, lengths) if s.arena is not None) + 1
        """Number of steps until a sequence outgrows its arena."""

    def run(self) -> torch.Tensor:
        """Return the logits [B, vocab] of the next tokens."""
        raise NotImplementedError

    def advance(self, tokens: torch.Tensor) -> None:
        """Make `tokens` [B] the inputs of the next step."""
        self.tokens = tokens
        self.positions += 1
        self.steps_left -= 1


class _TorchBatch(DecodeBatch):
    def __init__(self, runner: ModelRunner, arenas: Seq[Arena]) -> None:
        super().__init__(runner.device, arenas)
        self._runner = runner

    def run(self) -> torch.Tensor:
        runner, heads, dim = self._runner, self._runner.config.num_kv_heads, self._runner.config.head_dim
        counts = [len(arena.sequences) for arena in self._arenas]
        inputs = [self._slots_and_mask(*each) for each in zip(self._arenas, torch.split(self.positions, counts))]

        def attend(layer: int, qkv: torch.Tensor) -> torch.Tensor:
            outs = []
            for arena, (slots, mask), part in zip(self._arenas, inputs, torch.split(qkv, counts)):
                kv = arena.kv[layer]
                kv.view(-1, dim).index_put_((slots,), runner.new_keys_values(part))
                keys, values = kv.view(2, -1, arena.capacity, dim)[:, : len(part) * heads, : mask.shape[-1]]
                outs.append(runner.attend(runner.queries(part), keys.transpose(1, 2), values, mask))
            return outs[0] if len(outs) == 1 else torch.cat(outs)

        rotation = runner.rotations(max(len(s.tokens) for s in self.sequences))[self.positions]
        return runner.logits(runner.layers(self.tokens, rotation, attend))

    def _slots_and_mask(self, arena: Arena, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the slots of the step's keys and values, in units of head_dim, and the [n * H, 1, S] mask.

        The mask is -inf after a sequence's keys, else 0.
        """
        runner, device = self._runner, positions.device
        longest = max(len(s.tokens) for s in arena.sequences)
        keys = torch.arange(min(arena.capacity, -(-longest // _KEY_STEP) * _KEY_STEP), device=device)
        mask = positions.new_zeros((len(positions), 1, len(keys)), dtype=runner.kv_dtype)
        mask.masked_fill_((keys > positions[:, None])[:, None], float("-inf"))
        rows = torch.arange(len(positions), device=device)
        return runner.slots(arena, rows, positions), mask.repeat_interleave(runner.config.num_kv_heads, dim=0)


def new_routed(config: ModelConfig, total: int, device: torch.device) -> torch.Tensor | None:
    """Return a [total, layers, k] tensor of -1 for each token's experts; None for a dense model."""
    if config.moe is None:
        return None
    shape = (total, config.num_layers, config.moe.experts_per_token)
    return torch.full(shape, -1, dtype=torch.int32, device=device)


def note_routed(routed: torch.Tensor | None, pieces: Iterable[tuple[Sequence, int, int]]) -> None:
    """Copy rows of the last forward pass to their sequences: (sequence, first token, end), laid end to end."""
    if routed is None:
        return
    rows, at = routed.cpu().numpy(), 0
    for sequence, start, end in pieces:
        sequence.note_routed(start, rows[at : at + end - start])
        at += end - start


class ModelRunner:
    """The forward pass of Llama, Qwen2, Qwen3 and Qwen3-MoE."""

    def __init__(self, config: ModelConfig, weights: FusedWeights, device: torch.device, dtype: torch.dtype) -> None:
        self.config, self.weights, self.device, self.dtype = config, weights, device, dtype
        self.kv_dtype = torch.float32 if device.type == "cpu" else dtype
        """Dtype of keys and values. On CPUs float32, since bfloat16 attention is slower there and less exact."""
        self.routed: torch.Tensor | None = None
        """[T, layers, k] experts of the last call of `layers`; None for a dense model."""
        self.score_tokens = None
        """None: sampling itself gives the log-probs."""
        self._scale = 1.0 / math.sqrt(config.head_dim)
        self._rotations = torch.empty(0, 1, config.head_dim // 2, dtype=torch.complex64, device=device)
        self.rotations(128)

    def weights_changed(self) -> None:
        """Do nothing: the weights are read in place."""

    def tensors(self) -> list[torch.Tensor]:
        """Return the copies of weights that the runner holds: none."""
        return []

    def decode_batch(self, arenas: Seq[Arena]) -> DecodeBatch:
        """Return the running sequences as one batch."""
        return _TorchBatch(self, arenas)

    def rotations(self, length: int) -> torch.Tensor:
        """Return the [>= length, 1, D / 2] complex64 rotations by position."""
        if length > self._rotations.shape[0]:
            positions = torch.arange(max(length, 2 * self._rotations.shape[0]), device=self.device)
            cos, sin = rope_cos_sin(self.config, positions, self.device)
            half = self.config.head_dim // 2
            self._rotations = torch.complex(cos[:, :half].contiguous(), sin[:, :half].contiguous())[:, None]
        return self._rotations

    def slots(self, arena: Arena, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the [t, 2, H] storage indices of keys and values of tokens at (row, position), in units of D."""
        heads, device = self.config.num_kv_heads, self.device
        sides = torch.arange(2, device=device)[None, :, None] * arena.num_rows
        base = (sides + rows[:, None, None]) * heads + torch.arange(heads, device=device)[None, None, :]
        return base * arena.capacity + positions[:, None, None]

    def layers(self, tokens: torch.Tensor, rotation: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Return the [T, hidden] states after the final norm for [T] ids."""
        config, weights, eps = self.config, self.weights, self.config.rms_norm_eps
        hidden, dim = config.hidden_size, config.head_dim
        total = tokens.shape[0]
        self.routed = new_routed(config, total, self.device)
        rotated = config.num_heads + config.num_kv_heads
        x = F.embedding(tokens, weights.embedding)
        for i, layer in enumerate(weights.layers):
            qkv = layer.qkv(F.rms_norm(x, (hidden,), layer.input_norm, eps)).view(total, -1, dim).float()
            heads = qkv[:, :rotated]
            if layer.qk_norm is not None:
                torch.mul(F.rms_norm(heads, (dim,), None, eps), layer.qk_norm, out=heads)
            torch.view_as_complex(heads.view(total, rotated, dim // 2, 2)).mul_(rotation)
            out = attend(i, qkv)
            x.add_(layer.o(out if out.dtype == x.dtype else out.to(x.dtype)))
            routed = None if self.routed is None else self.routed[:, i]
            x.add_(layer.mlp(F.rms_norm(x, (hidden,), layer.mlp_norm, eps), routed))
        return F.rms_norm(x, (hidden,), weights.final_norm, eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits [T, vocab] of [T, hidden] states."""
        return self.weights.lm_head(hidden)

    def queries(self, qkv: torch.Tensor) -> torch.Tensor:
        """Return the queries [n, H, G, D] of [n, Q + 2H, D], grouped by shared keys."""
        config = self.config
        group = config.num_heads // config.num_kv_heads
        queries = qkv[:, : config.num_heads].view(qkv.shape[0], config.num_kv_heads, group, config.head_dim)
        return queries if queries.dtype == self.kv_dtype else queries.to(self.kv_dtype)

    def new_keys_values(self, qkv: torch.Tensor) -> torch.Tensor:
        """Return the keys and values [n, 2, H, D] of [n, Q + 2H, D]."""
        config = self.config
        new = qkv[:, config.num_heads :].view(qkv.shape[0], 2, config.num_kv_heads, config.head_dim)
        return new if new.dtype == self.kv_dtype else new.to(self.kv_dtype)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Attend from one query position: [n, H, G, D] over keys [n * H, D, S], values [n * H, S, D] -> [n, Q * D].

        Three batched products are 10 to 20% faster on CPUs than one `scaled_dot_product_attention` of one position.
        """
        scores = torch.baddbmm(mask, q.reshape(k.shape[0], -1, k.shape[1]), k, alpha=self._scale)
        return torch.bmm(torch.softmax(scores, dim=-1), v).view(q.shape[0], -1)

    # -- prefill ---------------------------------------------------------------------------------------

    def prefill(self, sequences: Seq[Sequence], starts: Seq[int]) -> list[torch.Tensor]:
        """Store keys and values of `tokens[start:]` of each sequence; return final hidden states [len - start, hidden].

        The sequences must occupy rows, and everything before `start` must be stored already.
        """
        done: dict[Sequence, list[torch.Tensor]] = {s: [] for s in sequences}
        cursor = dict(zip(sequences, starts))
        order = sorted(sequences, key=lambda s: (s.arena.capacity if s.arena else 0, s.row))
        while order:
            wave = self._next_wave(order, cursor)
            pieces = [(s, cursor[s], end) for s, end in wave]
            for (sequence, _, end), hidden in zip(pieces, self._prefill_wave(pieces)):
                done[sequence].append(hidden)
                cursor[sequence] = end
            order = [s for s in order if cursor[s] < len(s.tokens)]
        return [parts[0] if len(parts) == 1 else torch.cat(parts) for parts in done.values()]

    def _next_wave(self, order: list[Sequence], cursor: dict[Sequence, int]) -> list[tuple[Sequence, int]]:
        """Return sequences in adjacent rows of an arena and the end of each: within budget, with little padding."""
        wave: list[tuple[Sequence, int]] = []
        longest = total = 0
        for sequence in order:
            piece = max(64, min(PREFILL_TOKENS, _MASK_ENTRIES // (len(sequence.tokens) * self.config.num_heads)))
            length = min(len(sequence.tokens) - cursor[sequence], piece)
            if wave:
                last = wave[-1][0]
                longest = max(longest, length)
                padded = longest * (len(wave) + 1)
                adjacent = sequence.arena is last.arena and sequence.row == last.row + 1
                if not adjacent or padded > PREFILL_TOKENS or padded > 2 * (total + length) + 256:
                    break
            wave.append((sequence, cursor[sequence] + length))
            longest, total = max(longest, length), total + length
        return wave

    def _prefill_wave(self, pieces: list[tuple[Sequence, int, int]]) -> list[torch.Tensor]:
        config, device = self.config, self.device
        arena = pieces[0][0].arena
        assert arena is not None
        first, n = pieces[0][0].row, len(pieces)
        lengths = [end - start for _, start, end in pieces]
        longest, read = max(lengths), max(end for _, _, end in pieces)
        counts = torch.tensor(lengths, device=device)
        row = torch.repeat_interleave(torch.arange(n, device=device), counts)
        offset = torch.cat([torch.arange(length, device=device) for length in lengths])
        positions = offset + torch.tensor([start for _, start, _ in pieces], device=device)[row]
        tokens = torch.tensor([t for s, start, end in pieces for t in s.tokens[start:end]], device=device)
        slots = self.slots(arena, row + first, positions)
        group = config.num_heads // config.num_kv_heads

        # Query j of row r sees keys up to position starts[r] + j; the padding queries see what the row's last one sees.
        limits = torch.tensor([start for _, start, _ in pieces], device=device)[:, None] + torch.arange(
            longest, device=device
        )
        hidden_keys = torch.arange(read, device=device) > limits[:, :, None]
        mask = torch.zeros((n, 1, 1, longest, read), device=device, dtype=self.kv_dtype)
        mask.masked_fill_(hidden_keys[:, None, None], float("-inf"))
        mask = mask.expand(n, 1, group, longest, read).reshape(n, 1, group * longest, read)
        packed = all(length == longest for length in lengths)
        padded_index = row * longest + offset

        def attend(layer: int, qkv: torch.Tensor) -> torch.Tensor:
            arena.kv[layer].view(-1, config.head_dim).index_put_((slots,), self.new_keys_values(qkv))
            keys, values = arena.kv[layer, :, first : first + n, :, :read]
            queries = self.queries(qkv)
            if not packed:
                padded = queries.new_zeros((n * longest, *queries.shape[1:]))
                queries = padded.index_copy_(0, padded_index, queries)
            queries = queries.view(n, longest, config.num_kv_heads, group, config.head_dim).permute(0, 2, 3, 1, 4)
            out = F.scaled_dot_product_attention(
                queries.reshape(n, config.num_kv_heads, group * longest, config.head_dim),
                keys, values, attn_mask=mask, scale=self._scale,
            )  # fmt: skip
            out = out.view(n, config.num_kv_heads, group, longest, config.head_dim).permute(0, 3, 1, 2, 4)
            out = out.reshape(n * longest, -1)
            return out if packed else out[padded_index]

        rotation = self.rotations(read)[positions]
        states = self.layers(tokens, rotation, attend)
        note_routed(self.routed, pieces)
        return list(torch.split(states, lengths))
