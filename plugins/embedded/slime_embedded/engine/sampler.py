"""Logits -> next tokens and their log-probs, without state.

The core calls it after every forward pass. The random number of a token is a hash of (seed of the request, position),
so what a request samples depends on its seed and its logits, never on its neighbours in the batch or on history.
Log-probs are of the temperature-scaled full distribution, before penalties, min_new_tokens, top-k, top-p and min-p
(temperature 1 for greedy requests), which is what a trainer recomputes; for sequences that keep what they were sampled
among (`Sequence.kept`), of the softmax over that.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np
import torch
from numpy.typing import NDArray

from slime_embedded.engine.sequence import Sequence

ScoreTokens = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(logits [n, vocab], tokens [n], temperatures [n, 1]) -> log-probs [n]."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Finaliser of SplitMix64 (Steele, Lea, Flood 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    out: NDArray[np.uint64] = x ^ (x >> np.uint64(31))
    return out


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.uint64]) -> NDArray[np.float32]:
    """[n] float32 in [0, 1): hashes of uint64 `seeds` and `positions`.

    23 bits, so that `u * total < total` holds in float32 for every total, and a token of probability 0 cannot win.
    """
    with np.errstate(over="ignore"):
        bits = _mix(_mix(seeds + _GOLDEN) + (positions + np.uint64(1)) * _GOLDEN)
    out: NDArray[np.float32] = (bits >> np.uint64(41)).astype(np.float32) * np.float32(2.0**-23)
    return out


def derive_seed(seed: int, counter: int) -> int:
    """The `counter`-th seed drawn from `seed`."""
    with np.errstate(over="ignore"):
        mixed = _mix(_mix(np.array([seed & (2**64 - 1)], np.uint64) + _GOLDEN) + np.uint64(counter) * _GOLDEN)
    return int(mixed[0])


class SamplingBatch:
    """The sampling settings of a batch as tensors; valid while its sequences stay the same, one use per step."""

    def __init__(self, sequences: Seq[Sequence], device: torch.device, score: ScoreTokens | None = None) -> None:
        self.sequences = list(sequences)
        self._device = device
        self._score = score
        params = [s.params for s in self.sequences]
        self._seeds = np.array([s.seed for s in self.sequences], dtype=np.uint64)
        self._positions = np.array([len(s.tokens) for s in self.sequences], dtype=np.uint64)
        greedy = [p.greedy for p in params]
        scales = [1.0 if p.greedy else p.temperature for p in params]
        self._temperatures = torch.tensor(scales, device=device)[:, None]
        self._greedy = torch.tensor(greedy, device=device) if any(greedy) else None
        self._all_greedy = all(greedy)
        self._scales = self._temperatures if any(s != 1.0 for s in scales) else None
        self._filtered = [i for i, p in enumerate(params) if p.filtered and not p.greedy]
        self._filters = self._filter_tensors() if self._filtered else None
        self._penalised = [i for i, p in enumerate(params) if p.penalised]
        self._guarded = [i for i, p in enumerate(params) if p.min_new_tokens > 0]
        self._constrained = [i for i, s in enumerate(self.sequences) if s.constraint is not None]
        self._cut = bool(self._penalised or self._guarded or self._constrained)
        self._keeps = any(s.kept is not None for s in self.sequences)
        self._top = [i for i, s in enumerate(self.sequences) if s.top_logprobs]

    def _filter_tensors(self) -> tuple[torch.Tensor, ...]:
        chosen = [self.sequences[i].params for i in self._filtered]
        rows = torch.tensor(self._filtered, device=self._device)
        top_p = torch.tensor([p.top_p if p.top_p < 1 else 2.0 for p in chosen], device=self._device)[:, None]
        # Bounded: a larger number is as good as off, and more than 64 bits would end the step for every request.
        top_k = torch.tensor([min(p.top_k, 2**31) if p.top_k > 0 else 2**31 for p in chosen], device=self._device)
        min_p = torch.tensor([p.min_p for p in chosen], device=self._device)[:, None]
        return rows, top_p, top_k[:, None], min_p

    def sample(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[n, vocab] logits, changed in place -> ([n] int64 tokens, [n] float32 log-probs)."""
        logits = logits.float()
        raw = None if self._score is None else logits.clone()
        if self._scales is not None:
            logits.div_(self._scales)
        probs = torch.softmax(logits, dim=-1)
        if self._top:
            self._report_top(logits)
        chosen = probs
        if self._cut:
            chosen = torch.softmax(self._constrain(logits), dim=-1)
        if self._all_greedy:
            tokens = chosen.argmax(dim=-1)
        else:
            if self._filters is not None:
                self._filter(chosen := chosen.clone() if chosen is probs else chosen)
            tokens = self._draw(chosen)
            if self._filters is not None and self._keeps:
                self._keep(chosen, logits if raw is None else raw)
        self._positions += np.uint64(1)
        if self._score is not None and raw is not None:
            return tokens, self._score(raw, tokens, self._temperatures)
        if self._cut or self._keeps:
            # A constraint can force a token whose probability underflows; its log-prob must stay finite.
            return tokens, logits.log_softmax(dim=-1).gather(1, tokens[:, None]).squeeze(1)
        return tokens, probs.gather(1, tokens[:, None]).squeeze(1).log_()

    def _draw(self, probs: torch.Tensor) -> torch.Tensor:
        """Inverse of the cumulative distribution at each row's uniform number."""
        cdf = torch.cumsum(probs, dim=-1)
        uniform = torch.from_numpy(uniforms(self._seeds, self._positions)).to(self._device)
        targets = uniform[:, None] * cdf[:, -1:]
        tokens = torch.searchsorted(cdf, targets, right=True).squeeze(1).clamp_(max=probs.shape[1] - 1)
        return tokens if self._greedy is None else torch.where(self._greedy, probs.argmax(dim=-1), tokens)

    def _filter(self, probs: torch.Tensor) -> None:
        """Set to zero, in the filtered rows, what top-k, top-p and min-p exclude (each judged on the full row)."""
        assert self._filters is not None
        rows, top_p, top_k, min_p = self._filters
        values, order = probs[rows].sort(dim=-1, descending=True, stable=True)
        before = values.cumsum(dim=-1) - values
        ranks = torch.arange(values.shape[1], device=self._device)
        drop = (before >= top_p) | (ranks >= top_k) | (values < min_p * values[:, :1])
        drop[:, 0] = False
        values = values.masked_fill(drop, 0.0)
        probs[rows] = torch.zeros_like(values).scatter_(1, order, values)

    def _keep(self, chosen: torch.Tensor, logits: torch.Tensor) -> None:
        """Note in the filtered sequences what they were sampled among, and make the rest of their logits -inf."""
        rows = torch.tensor(self._filtered, device=self._device)
        kept = chosen[rows] > 0
        logits[rows] = logits[rows].masked_fill_(~kept, float("-inf"))
        for i, ids in zip(self._filtered, torch.split(kept.nonzero()[:, 1], kept.sum(dim=1).tolist())):
            found = self.sequences[i].kept
            assert found is not None
            found.append(ids.tolist())

    def _constrain(self, logits: torch.Tensor) -> torch.Tensor:
        """Penalties on what was already generated; no stop token before min_new_tokens; what a grammar allows."""
        logits = logits.clone()
        for i in self._penalised:
            sequence, row = self.sequences[i], logits[i]
            params = sequence.params
            if params.repetition_penalty != 1.0:
                seen = torch.tensor(sorted(set(sequence.tokens)), device=self._device)
                values = row[seen]
                row[seen] = torch.where(
                    values > 0, values / params.repetition_penalty, values * params.repetition_penalty
                )
            output = sequence.output_ids
            if output and (params.presence_penalty or params.frequency_penalty):
                ids, counts = torch.unique(torch.tensor(output, device=self._device), return_counts=True)
                # Penalties belong to the logits before the division by the temperature (SGLang, OpenAI).
                scale = 1.0 if params.greedy else params.temperature
                row[ids] -= (params.presence_penalty + params.frequency_penalty * counts) / scale
        for i in self._guarded:
            sequence = self.sequences[i]
            if sequence.num_output < sequence.params.min_new_tokens and sequence.stop_ids:
                logits[i, sorted(sequence.stop_ids)] = float("-inf")
        for i in self._constrained:
            constraint = self.sequences[i].constraint
            assert constraint is not None
            logits[i].masked_fill_(~torch.from_numpy(constraint.allowed()).to(self._device), float("-inf"))
        return logits

    def _report_top(self, logits: torch.Tensor) -> None:
        rows = torch.tensor(self._top, device=self._device)
        log_probs = logits[rows].log_softmax(dim=-1)
        for i, row in zip(self._top, log_probs):
            sequence = self.sequences[i]
            values, ids = row.topk(min(sequence.top_logprobs, row.shape[0]))
            sequence.top.append(list(zip(values.tolist(), ids.tolist())))
