"""Token prefixes -> stored keys and values, so a prompt that was computed is not computed again.

The scheduler looks up every new prompt. Two kinds of owner: a running sequence (siblings of its group copy its
prompt) and a finished one (the next turn extends it), whose keys and values are kept compactly until the budget
or a weight update evicts them. Prefixes are indexed at multiples of `BLOCK` tokens and then extended token by token.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from slime_embedded.engine.sequence import Sequence

BLOCK = 16
_Key = tuple[int | str, tuple[int, ...]]
"""Number of the node before a block, or the adapter in front of the first one; the block's tokens."""


@dataclass(eq=False)
class Owner:
    """A token sequence whose first `stored` tokens have keys and values somewhere."""

    tokens: list[int]
    stored: int
    adapter: str
    sequence: Sequence | None = None
    """The running sequence that has them in its row, or"""
    kv: torch.Tensor | None = None
    """[layer, key or value, kv head, stored, head_dim]"""
    routed: np.ndarray | None = None
    """[stored, layers, k] experts of a finished sequence's tokens; None for a dense model."""
    nodes: list[_Key] = field(default_factory=list)

    def read_routed(self, length: int) -> np.ndarray | None:
        """[length, layers, k] experts that made the keys and values; None for a dense model."""
        routed = self.routed if self.sequence is None else self.sequence.routed
        return None if routed is None else routed[:length]

    def read(self, length: int) -> torch.Tensor:
        """[layer, key or value, kv head, length, head_dim], a view."""
        if self.kv is not None:
            return self.kv[:, :, :, :length]
        assert self.sequence is not None
        assert self.sequence.arena is not None
        return self.sequence.arena.kv[:, :, self.sequence.row, :, :length]


@dataclass
class _Node:
    number: int
    owners: dict[Owner, None] = field(default_factory=dict)


class PrefixCache:
    """The index over all owners, with least-recently-used eviction of the finished ones."""

    def __init__(self) -> None:
        self._nodes: dict[_Key, _Node] = {}
        self._next_number = 1
        self._running: dict[Sequence, Owner] = {}
        self._finished: dict[Owner, None] = {}
        self.finished_tokens = 0
        """Tokens held for finished sequences."""

    def match(self, tokens: list[int], limit: int, adapter: str = "") -> tuple[Owner | None, int]:
        """Return the owner with this adapter that shares the longest prefix of `tokens[:limit]`, and its length."""
        parent: int | str = adapter
        owner = None
        for start in range(0, limit - BLOCK + 1, BLOCK):
            node = self._nodes.get((parent, tuple(tokens[start : start + BLOCK])))
            if node is None:
                break
            parent, owner = node.number, next(reversed(node.owners))
        if owner is None:
            return None, 0
        length, end = BLOCK, min(limit, owner.stored)
        while length < end and owner.tokens[length] == tokens[length]:
            length += 1
        if owner in self._finished:
            self._finished[owner] = self._finished.pop(owner)
        return owner, length

    def add_running(self, sequence: Sequence, stored: int) -> None:
        """Offer the first `stored` tokens of a running sequence."""
        if stored >= BLOCK:
            self._running[sequence] = self._index(Owner(sequence.tokens, stored, sequence.adapter, sequence=sequence))

    def drop_running(self, sequence: Sequence) -> None:
        """Forget a sequence that is about to lose its row."""
        owner = self._running.pop(sequence, None)
        if owner is not None:
            self._unindex(owner)

    def keep(self, sequence: Sequence, budget: int) -> None:
        """Copy the keys and values of a sequence that is finishing, within `budget` tokens for all kept ones."""
        stored = len(sequence.tokens) - 1
        if stored < BLOCK or stored > budget or sequence.arena is None:
            return
        self.shrink(budget - stored)
        kv = sequence.arena.kv[:, :, sequence.row, :, :stored].clone()
        routed = None if sequence.routed is None else sequence.routed[:stored].copy()
        owner = self._index(Owner(sequence.tokens[:stored], stored, sequence.adapter, kv=kv, routed=routed))
        self._finished[owner] = None
        self.finished_tokens += stored

    def shrink(self, tokens: int) -> None:
        """Evict the least recently used finished owners until at most `tokens` are held."""
        while self.finished_tokens > max(tokens, 0):
            owner = next(iter(self._finished))
            del self._finished[owner]
            self.finished_tokens -= owner.stored
            self._unindex(owner)

    def clear(self) -> None:
        """Forget everything, running sequences included."""
        self._nodes.clear()
        self._running.clear()
        self._finished.clear()
        self.finished_tokens = 0

    def _index(self, owner: Owner) -> Owner:
        parent: int | str = owner.adapter
        for start in range(0, owner.stored - BLOCK + 1, BLOCK):
            key = (parent, tuple(owner.tokens[start : start + BLOCK]))
            node = self._nodes.get(key)
            if node is None:
                node = self._nodes[key] = _Node(self._next_number)
                self._next_number += 1
            node.owners[owner] = None
            owner.nodes.append(key)
            parent = node.number
        return owner

    def _unindex(self, owner: Owner) -> None:
        for key in owner.nodes:
            node = self._nodes[key]
            del node.owners[owner]
            if not node.owners:
                del self._nodes[key]
