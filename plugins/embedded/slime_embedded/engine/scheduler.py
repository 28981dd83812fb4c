"""Choose the sequences to run: admission within the KV budget, prefix reuse, preemption when the budget runs out.

The core calls `admit` before every step and `make_room` before every decode step. A sequence never fails for lack of
room: it waits, or it loses its row and is computed again later.

    add --> waiting --admit--> running --finish--> (prefix cache)
               ^                  |
               +---- preempt -----+
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from slime_embedded.engine.kv_cache import KVCache
from slime_embedded.engine.prefix_cache import BLOCK, PrefixCache
from slime_embedded.engine.sequence import Sequence

PREFILL_BUDGET = 8192
"""Prompt tokens admitted per step, so running sequences are not held up for long."""


@dataclass
class Admission:
    """The sequences to prefill in a step."""

    sequences: list[Sequence] = field(default_factory=list)
    """Sequences placed in rows, with their cached prefixes copied."""
    starts: list[int] = field(default_factory=list)
    """First token to compute of each sequence."""
    twins: list[tuple[Sequence, Sequence]] = field(default_factory=list)
    """Pairs (sequence, leader) with equal tokens: the leader's row and logits are copied once they are computed."""


class Scheduler:
    """The waiting queue and the rows."""

    def __init__(self, cache: KVCache, prefixes: PrefixCache | None, max_running: int) -> None:
        self.cache, self.prefixes, self._max_running = cache, prefixes, max_running
        self.waiting: deque[Sequence] = deque()
        self._admissions: dict[Sequence, None] = {}

    @property
    def running(self) -> list[Sequence]:
        """Running sequences in order of admission."""
        return list(self._admissions)

    @property
    def num_running(self) -> int:
        """Number of sequences that have a row."""
        return len(self._admissions)

    def admit(self) -> Admission:
        """Move waiting sequences into rows, first come first served.

        Twins get their rows after all leaders, so the leaders' rows are adjacent and are computed in one pass.
        """
        admission, leaders, tokens, kept = Admission(), dict[tuple[str, tuple[int, ...]], Sequence](), 0, 0
        while self.waiting and self.num_running < self._max_running and tokens < PREFILL_BUDGET:
            sequence = self.waiting[0]
            length = len(sequence.tokens)
            room = min(length + 1, self.cache.max_context)
            if not self._has_room(room, kept):
                break
            self.waiting.popleft()
            self._admissions[sequence] = None
            sequence.outdated = False
            leader = self._leader(sequence, leaders)
            if leader is not None:
                admission.twins.append((sequence, leader))
                kept += self.cache.capacity_for(room)
                continue
            start = self._place_with_prefix(sequence, room)
            admission.sequences.append(sequence)
            admission.starts.append(start)
            tokens += length - start
        for twin, _ in admission.twins:
            self.cache.arena_for(min(len(twin.tokens) + 1, self.cache.max_context), twin.adapter).place(twin)
        return admission

    def _leader(self, sequence: Sequence, leaders: dict[tuple[str, tuple[int, ...]], Sequence]) -> Sequence | None:
        if self.prefixes is None or sequence.reusable < len(sequence.tokens) - 1:
            return None
        leader = leaders.setdefault((sequence.adapter, tuple(sequence.tokens)), sequence)
        return leader if leader is not sequence else None

    def _has_room(self, length: int, kept: int) -> bool:
        """Return whether there is room besides `kept` tokens for later sequences; evict finished prefixes if needed."""
        if self.prefixes is not None and not self.cache.fits(length, kept + self.prefixes.finished_tokens):
            needed = self.cache.used_tokens + kept + self.cache.capacity_for(length)
            self.prefixes.shrink(self.cache.max_tokens - needed)
        return self.cache.fits(length, kept)

    def _place_with_prefix(self, sequence: Sequence, room: int) -> int:
        """Place the sequence. Returns the number of leading tokens copied from the prefix cache."""
        owner, matched = None, 0
        if self.prefixes is not None:
            owner, matched = self.prefixes.match(sequence.tokens, sequence.reusable, sequence.adapter)
        self.cache.arena_for(room, sequence.adapter).place(sequence)
        if owner is None:
            return 0
        assert sequence.arena is not None
        sequence.arena.kv[:, :, sequence.row, :, :matched].copy_(owner.read(matched))
        routed = owner.read_routed(matched)
        if routed is not None:
            sequence.note_routed(0, routed)
        if sequence.num_output == 0:
            sequence.cached_tokens = matched
        return matched

    def prefilled(self, sequences: list[Sequence]) -> None:
        """Offer the tokens of newly computed sequences to later sequences."""
        if self.prefixes is not None:
            for sequence in sequences:
                self.prefixes.add_running(sequence, len(sequence.tokens))

    def make_room(self) -> None:
        """Move sequences that outgrow their row, preempting the youngest when the budget is full."""
        for sequence in self.running:
            while sequence.arena is not None and len(sequence.tokens) > sequence.arena.capacity:
                freed = sequence.arena.capacity
                target = self.cache.capacity_for(len(sequence.tokens))
                needed = self.cache.used_tokens - freed + target
                if self.prefixes is not None:
                    self.prefixes.shrink(self.cache.max_tokens - needed)
                if needed <= self.cache.max_tokens or self.num_running == 1:
                    self.cache.grow(sequence, len(sequence.tokens))
                else:
                    self.preempt(self.running[-1])

    def preempt(self, sequence: Sequence) -> None:
        """Take the row away; the sequence waits at the front and keeps its tokens."""
        self._release(sequence)
        self.waiting.appendleft(sequence)

    def finish(self, sequence: Sequence, keep: bool = True) -> None:
        """Remove a sequence, running or waiting; `keep` offers what it stored to later ones."""
        if sequence in self._admissions:
            if keep and self.prefixes is not None and len(sequence.tokens) > BLOCK:
                freed = sequence.arena.capacity if sequence.arena is not None else 0
                self.prefixes.keep(sequence, self.cache.max_tokens - self.cache.used_tokens + freed)
            self._release(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def _release(self, sequence: Sequence) -> None:
        if self.prefixes is not None:
            self.prefixes.drop_running(sequence)
        self.cache.free(sequence)
        del self._admissions[sequence]
