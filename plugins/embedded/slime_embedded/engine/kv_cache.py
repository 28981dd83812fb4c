"""Keys and values of the running sequences, in rows that one attention call can read without a copy.

An `Arena` holds sequences of one adapter and length class (64, 128, 256, ... tokens) in rows 0..n-1 without holes, so a
decode step reads `[:n, :, :longest]` as one strided tensor and pays at most twice a sequence's length. A sequence that
outgrows its class moves to the next. The scheduler asks `KVCache` for room; the model runner reads the arenas.

    arena 64    row 0 [########........]     arena 128   row 0 [#################...............]
                row 1 [####............]                 row 1 [####################............]
"""

from __future__ import annotations

import torch

from slime_core.models.config import ModelConfig
from slime_embedded.engine.sequence import Sequence

MIN_CAPACITY = 64


class Arena:
    """Rows of one capacity. Row `i` belongs to `sequences[i]`."""

    def __init__(self, capacity: int, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        self.capacity = capacity
        """Tokens per row."""
        self.sequences: list[Sequence] = []
        self.kv = torch.zeros(
            (config.num_layers, 2, 0, config.num_kv_heads, capacity, config.head_dim), device=device, dtype=dtype
        )
        """[layer, key or value, row, kv head, token, head_dim]"""

    @property
    def num_rows(self) -> int:
        """Rows allocated."""
        return self.kv.shape[2]

    def resize(self, rows: int) -> None:
        """Reallocate to `rows` rows, keeping the used ones. Zeros, because 0 * (stale NaN) would poison a sum."""
        used = len(self.sequences)
        kv = self.kv.new_zeros((*self.kv.shape[:2], rows, *self.kv.shape[3:]))
        kv[:, :, :used].copy_(self.kv[:, :, :used])
        self.kv = kv

    def place(self, sequence: Sequence) -> None:
        """Give `sequence` the next row."""
        row = len(self.sequences)
        assert row < self.num_rows
        self.sequences.append(sequence)
        sequence.arena, sequence.row = self, row

    def remove(self, sequence: Sequence) -> None:
        """Free the row of `sequence`; the last row moves into the hole."""
        row, last = sequence.row, len(self.sequences) - 1
        moved = self.sequences.pop()
        if row != last:
            length = len(moved.tokens)
            self.kv[:, :, row, :, :length].copy_(self.kv[:, :, last, :, :length])
            self.sequences[row] = moved
            moved.row = row
        sequence.arena, sequence.row = None, -1


class KVCache:
    """All arenas, and the budget of tokens they may hold."""

    def __init__(
        self,
        config: ModelConfig,
        device: torch.device,
        dtype: torch.dtype,
        *,
        max_tokens: int,
        max_context: int,
    ) -> None:
        self._config, self._device, self._dtype = config, device, dtype
        self.max_tokens = max_tokens
        self.max_context = max_context
        """Longest sequence, prompt and output."""
        self.arenas: dict[tuple[int, str], Arena] = {}
        """Arenas by capacity and adapter."""

    @property
    def used_tokens(self) -> int:
        """Tokens reserved by running sequences."""
        return sum(arena.capacity * len(arena.sequences) for arena in self.arenas.values())

    def capacity_for(self, length: int) -> int:
        """The length class of a sequence that will store `length` tokens."""
        capacity = MIN_CAPACITY
        while capacity < length:
            capacity *= 2
        return min(capacity, max(self.max_context, length))

    def fits(self, length: int, reserved: int = 0) -> bool:
        """Is there room for one more sequence of `length` tokens next to `reserved` other ones?"""
        return self.used_tokens + reserved + self.capacity_for(length) <= self.max_tokens

    def arena_for(self, length: int, adapter: str = "") -> Arena:
        """Return the arena for sequences of `length` tokens and an adapter, with a free row."""
        capacity = self.capacity_for(length)
        if (capacity, adapter) not in self.arenas:
            self.arenas[capacity, adapter] = Arena(capacity, self._config, self._device, self._dtype)
            self.arenas = dict(sorted(self.arenas.items()))
        arena = self.arenas[capacity, adapter]
        needed = len(arena.sequences) + 1
        if needed > arena.num_rows:
            self._make_space((max(needed, 2 * arena.num_rows) - arena.num_rows) * capacity)
            arena.resize(max(needed, min(2 * arena.num_rows, self.max_tokens // capacity)))
        return arena

    def _make_space(self, tokens: int) -> None:
        """Give back unused rows when the arenas together have grown past the budget."""
        if sum(a.capacity * a.num_rows for a in self.arenas.values()) + tokens > 2 * self.max_tokens:
            for arena in self.arenas.values():
                if arena.num_rows > len(arena.sequences):
                    arena.resize(len(arena.sequences))

    def grow(self, sequence: Sequence, length: int) -> None:
        """Move a sequence to the arena for `length` tokens; all tokens but the last are stored."""
        source, row, stored = sequence.arena, sequence.row, len(sequence.tokens) - 1
        assert source is not None
        target = self.arena_for(length, sequence.adapter)
        assert target is not source
        target.place(sequence)
        target.kv[:, :, sequence.row, :, :stored].copy_(source.kv[:, :, row, :, :stored])
        target_row = sequence.row
        sequence.row = row
        source.remove(sequence)
        sequence.arena, sequence.row = target, target_row

    def free(self, sequence: Sequence) -> None:
        """Give the row back; a sequence without a row is left alone."""
        if sequence.arena is not None:
            sequence.arena.remove(sequence)

    def clear(self) -> None:
        """Free all rows, of which none is in use."""
        assert not self.used_tokens, "a sequence still has its row"
        self.arenas = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all rows, those without a sequence included; prefixes of finished sequences are held elsewhere."""
        return sum(arena.kv.nbytes for arena in self.arenas.values())

    def wipe(self, sequence: Sequence) -> None:
        """Zero the row of a sequence that stored non-finite values, which no mask could hide from the next user."""
        if sequence.arena is not None:
            sequence.arena.kv[:, :, sequence.row].zero_()
