"""Represent a request inside the engine (`Sequence`), from waiting to finished, and its text (`TextStream`).

The scheduler moves sequences between queues, the cache assigns a row to each, and the core appends tokens. While a
sequence runs, its last token is not in the cache yet; it is the next step's input. The core feeds a `TextStream` if a
request has stop strings or is streamed; other requests are decoded once, at the end. A token may be a part of a
character, so a stream holds text back until the character is complete.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from slime_core.text import held_back
from slime_embedded.engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from slime_embedded.engine.constraints import Constraint
    from slime_embedded.engine.kv_cache import Arena


_INCOMPLETE = "\ufffd"


def decode(tokenizer: Any, ids: Seq[int], params: SamplingParams) -> str:
    """Return the text of `ids`; empty without a tokenizer."""
    if tokenizer is None or not ids:
        return ""
    text: str = tokenizer.decode(
        list(ids),
        skip_special_tokens=params.skip_special_tokens,
        spaces_between_special_tokens=params.spaces_between_special_tokens,
        clean_up_tokenization_spaces=False,
    )
    return text


class TextStream:
    """The text of a growing list of ids. It decodes a short tail per token, with the last complete text as context."""

    def __init__(self, tokenizer: Any, params: SamplingParams) -> None:
        self._tokenizer, self._params = tokenizer, params
        self._context = 0
        self._read = 0
        self._longest_stop = max((len(s) for s in params.stop), default=0)
        self.text = ""
        """Complete characters so far."""
        self.stop_at: int | None = None
        """Index in `text` at which a stop string begins."""

    def update(self, ids: Seq[int], final: bool = False) -> str | None:
        """Read all output ids so far; return the first stop string found, or None. `final` releases held-back text."""
        before = decode(self._tokenizer, ids[self._context : self._read], self._params)
        tail = decode(self._tokenizer, ids[self._context :], self._params)
        if len(tail) <= len(before) or (tail.endswith(_INCOMPLETE) and not final):
            return None
        self.text += tail[len(before) :]
        self._context, self._read = self._read, len(ids)
        return self._find_stop(len(tail) - len(before))

    @property
    def safe_text(self) -> str:
        """Complete text, without an ending that may be the beginning of a stop string."""
        return self.text[: len(self.text) - held_back(self.text, self._params.stop)]

    def _find_stop(self, new: int) -> str | None:
        start = max(0, len(self.text) - new - self._longest_stop)
        found = [(self.text.find(stop, start), stop) for stop in self._params.stop]
        hits = [(at, stop) for at, stop in found if at >= 0]
        if not hits:
            return None
        self.stop_at, stop = min(hits)
        return stop


@dataclass(eq=False)
class Sequence:
    """A request: its prompt, its sampled tokens, and the place of its keys and values."""

    rid: str
    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    """Seed of the counter-based sampler."""
    limit: int
    """Maximum number of output tokens: max_new_tokens, or as many as fit into the context."""
    stop_ids: frozenset[int]
    """Token ids that end the sequence."""
    logprob_start: int | None = None
    """Position from which log-probs of prompt tokens are returned; None for no prompt log-probs."""
    top_logprobs: int = 0
    """Number of most likely tokens to report per output token, and per prompt token after `logprob_start`."""
    streaming: bool = False
    constraint: Constraint | None = None
    """Constraint on the next token, if the request has a grammar."""
    adapter: str = ""
    """Name of the adapter that generates, of `--lora-adapters`; "" is the shared one."""
    tokens: list[int] = field(default_factory=list)
    """[prompt + output] ids."""
    log_probs: list[float] = field(default_factory=list)
    """[output]"""
    kept: list[list[int]] | None = None
    """[output] ids among which each token was sampled after top-k, top-p and min-p; empty for a request without them.
    None: not requested."""
    top: list[list[tuple[float, int]]] = field(default_factory=list)
    """[output][top_logprobs] (log-prob, id)"""
    prompt_log_probs: list[float] = field(default_factory=list)
    """Log-probs of prompt tokens after `logprob_start`."""
    prompt_top: list[list[tuple[float, int]]] = field(default_factory=list)
    """[prompt tokens after `logprob_start`][top_logprobs] (log-prob, id)"""
    version_runs: list[tuple[int, int]] = field(default_factory=list)
    """(output index, weight version from this index on)."""
    arena: Arena | None = None
    row: int = -1
    """Row in `arena`."""
    outdated: bool = False
    """True if some keys and values were computed with weights that have been replaced."""
    cached_tokens: int = 0
    """Number of prompt tokens whose keys and values were found in the cache."""
    finish: dict[str, Any] | None = None
    """SGLang's finish reason, set once."""
    error: str | None = None
    """Set when the request failed instead of finishing."""
    text_stream: TextStream | None = None
    """Text stream; None unless text is needed before the end (stop strings or streaming)."""
    stop_match: str | None = None
    """Stop string that was found."""
    routed: np.ndarray | None = None
    """[room, layers, k] int32 experts of the tokens that went through the model; None for a dense model."""
    num_routed: int = 0
    """Number of leading tokens with their experts in `routed`."""
    created: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        if not self.tokens:
            self.tokens = list(self.prompt_ids)

    def note_routed(self, start: int, rows: np.ndarray) -> None:
        """Record experts [n, layers, k] of tokens from `start` on; known ones stay, since log-probs depend on them."""
        end = start + len(rows)
        if end <= self.num_routed:
            return
        assert start <= self.num_routed
        if self.routed is None or end > len(self.routed):
            grown = np.empty((max(end, 2 * self.num_routed, 64), *rows.shape[1:]), dtype=np.int32)
            if self.routed is not None:
                grown[: self.num_routed] = self.routed[: self.num_routed]
            self.routed = grown
        self.routed[self.num_routed : end] = rows[self.num_routed - start :]
        self.num_routed = end

    @property
    def num_output(self) -> int:
        """Number of sampled tokens."""
        return len(self.log_probs)

    @property
    def output_ids(self) -> list[int]:
        """[output] ids, including the stop token."""
        return self.tokens[len(self.prompt_ids) :]

    @property
    def reusable(self) -> int:
        """Number of leading tokens that need no hidden state, so that their keys and values may come from the cache."""
        last = len(self.tokens) - 1
        return last if self.logprob_start is None else min(last, self.logprob_start)

    def mark_version(self, version: int) -> None:
        """Record that tokens from here on are sampled with weight version `version`."""
        runs = self.version_runs
        if not runs or runs[-1][1] != version:
            runs.append((self.num_output, version))

    def token_versions(self) -> list[int]:
        """[output] weight version of each token."""
        ends = [start for start, _ in self.version_runs[1:]] + [self.num_output]
        return [v for (start, v), end in zip(self.version_runs, ends) for _ in range(end - start)]

    def take_row_of(self, leader: Sequence) -> None:
        """Copy keys, values and experts from another sequence with the same tokens."""
        assert leader.arena is not None
        assert self.arena is not None
        length = len(leader.tokens)
        self.arena.kv[:, :, self.row, :, :length].copy_(leader.arena.kv[:, :, leader.row, :, :length])
        if leader.routed is not None:
            self.note_routed(0, leader.routed[:length])
        if self.num_output == 0:
            self.cached_tokens = length
