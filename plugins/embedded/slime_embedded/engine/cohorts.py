"""The engine's forward pass for a model of transformers: cohorts of sequences that decode in one batch each.

Replaces `ModelRunner` and `FusedWeights` in the core, and leaves the scheduler as it is. Keys, values and recurrent
states are in the cache that the family itself makes, so every family with a cache generates. Sequences that are
prefilled together form a cohort. Shorter ones are padded on the left, if a probe at the start shows that this changes
no hidden state; else a cohort has sequences of one length, such as those of a group. There is no prefix cache, but
equal prompts are computed once.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any

import torch

from slime_core.models.config import ModelConfig
from slime_embedded.engine.kv_cache import Arena, KVCache
from slime_embedded.engine.model_runner import DecodeBatch
from slime_embedded.engine.scheduler import PREFILL_BUDGET
from slime_embedded.engine.sequence import Sequence
from slime_embedded.engine.weights import complete
from slime_embedded.hf.files import in_files
from slime_embedded.hf.model import TransformersModel, agree

logger = logging.getLogger(__name__)
_PROBE = (6, 9)
"""Lengths of the prompts of the probe."""


class TransformersWeights:
    """The parameters of the model under the names of the files, with the methods of `FusedWeights`."""

    packed_bytes = 0

    def __init__(self, model: TransformersModel) -> None:
        self._model = model
        with torch.inference_mode(False):
            for parameter in model.parameters():  # memory that a file is mapped to cannot be released
                if not parameter.untyped_storage().resizable():
                    parameter.data = parameter.data.clone()

    @torch.inference_mode()
    def update(self, weights: Iterable[tuple[str, torch.Tensor]], origin: str) -> None:
        """Copy a complete set of HF tensors in, or raise WeightSyncError and change nothing."""
        targets = dict(self.named())
        shapes = {name: tuple(tensor.shape) for name, tensor in targets.items()}
        for name, tensor in complete(weights, shapes, self._model.config, origin).items():
            targets[name].copy_(tensor)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Return all parameters."""
        return (parameter.data for parameter in self._model.parameters())

    def named(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield HF names and views of the parameters."""
        found = ((name, parameter.data) for name, parameter in self._model.named_parameters())
        return in_files(found, self._model.places)

    def drop_packed(self) -> None:
        """Do nothing: there are no packed copies."""


@dataclass(eq=False)
class _Cohort:
    """Sequences that share a cache of transformers, whose rows are theirs in this order."""

    sequences: list[Sequence]
    cache: Any
    mask: torch.Tensor | None
    """[sequences, tokens in the cache] 1 for tokens and 0 for padding; None: no padding."""

    def select(self, rows: list[int], device: torch.device) -> None:
        """Keep only the rows, or repeat some."""
        index = torch.tensor(rows, device=device)
        self.cache.reorder_cache(index)
        for states in vars(self.cache).values():
            if isinstance(states, list):  # tensors that a family keeps beside the cache's layers
                states[:] = [s[index] if isinstance(s, torch.Tensor) else s for s in states]
        self.mask = None if self.mask is None else self.mask[index]


class CohortCache(KVCache):
    """The scheduler's budget of tokens, in rows without storage: the tensors are in the cohorts."""

    def __init__(self, runner: TransformersRunner, *, max_tokens: int, max_context: int) -> None:
        super().__init__(
            replace(runner.config, num_layers=0), runner.device, runner.dtype,
            max_tokens=max_tokens, max_context=max_context,
        )  # fmt: skip
        self._runner = runner

    def free(self, sequence: Sequence) -> None:
        """Give the row back; forget the cohorts with the last row."""
        super().free(sequence)
        if not self.used_tokens:
            self._runner.cohorts.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of the caches of all cohorts."""
        return sum(_nbytes(vars(layer).values()) for cohort in self._runner.cohorts for layer in cohort.cache.layers)


def _nbytes(values: Iterable[Any]) -> int:
    parts = [tuple(value.values()) if isinstance(value, dict) else (value,) for value in values]
    return sum(part.nbytes for inner in parts for part in inner if isinstance(part, torch.Tensor))


class TransformersRunner:
    """Runner with `ModelRunner`'s methods over a model of transformers."""

    def __init__(self, config: ModelConfig, model: TransformersModel, device: torch.device, dtype: torch.dtype) -> None:
        self.config, self.model, self.device = config, model.requires_grad_(False), device
        self.dtype = self.kv_dtype = dtype
        self.routed = self.score_tokens = None
        self.cohorts: list[_Cohort] = []
        """Cohorts of running sequences, largest first; rows of ended sequences stay until the next decode batch."""
        taken = inspect.signature(model.inner.base.forward).parameters
        self._cache_name = "cache_params" if "cache_params" in taken else "past_key_values"
        self._takes_positions = "position_ids" in taken
        self.pads = agree(self._probe, self._probe(alone=True))
        """Whether prompts of different lengths share a batch."""
        if not self.pads:
            name = type(model.inner.model).__name__
            logger.warning("%s: padding changes its states, so only prompts of one length decode together", name)

    def weights_changed(self) -> None:
        """Do nothing: the parameters are read in place."""

    def tensors(self) -> list[torch.Tensor]:
        """Return no further tensors than the weights."""
        return []

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [T, vocab] of hidden states [T, hidden]."""
        return self.model.logits(hidden)

    def _probe(self, *, alone: bool = False) -> torch.Tensor:
        """Return the hidden states of two random prompts' next tokens, decoded in one cohort or each alone."""
        generator = torch.Generator().manual_seed(0)
        rows = [torch.randint(self.config.vocab_size, (n + 1,), generator=generator).tolist() for n in _PROBE]
        found = []
        for part in [rows[:1], rows[1:]] if alone else [rows]:
            _, cohort = self._computed([row[:-1] for row in part])
            lengths = [len(row) - 1 for row in part]
            found.append(self._decoded(cohort, torch.tensor([row[-1] for row in part]), torch.tensor(lengths)))
        return torch.cat(found)

    def prefill(self, sequences: Seq[Sequence], starts: Seq[int]) -> list[torch.Tensor]:
        """Compute prompts; return the final hidden states [length, hidden] of each sequence."""
        assert not any(starts), "there is no prefix cache"
        states: dict[Sequence, torch.Tensor] = {}
        for wave in self._waves(sequences):
            joined = wave + self._absorbed(wave)
            # The last token of a running sequence is the input of its next step.
            rows = [s.tokens if s in wave else s.tokens[:-1] for s in joined]
            hidden, cohort = self._computed(rows)
            cohort.sequences = joined
            states.update(zip(wave, hidden))
            self.cohorts.append(cohort)
            self.cohorts.sort(key=lambda c: -len(c.sequences))
        return [states[sequence] for sequence in sequences]

    def _waves(self, sequences: Seq[Sequence]) -> list[list[Sequence]]:
        """Split sequences into batches with little padding."""
        waves: list[list[Sequence]] = []
        total = 0
        for sequence in sorted(sequences, key=lambda s: len(s.tokens)):
            length = len(sequence.tokens)
            padded = length * (len(waves[-1]) + 1) if waves else 0
            fits = bool(waves) and padded <= min(PREFILL_BUDGET, 2 * (total + length) + 256)
            if fits and (self.pads or len(waves[-1][0].tokens) == length):
                waves[-1].append(sequence)
                total += length
            else:
                waves.append([sequence])
                total = length
        return waves

    def _absorbed(self, wave: Seq[Sequence]) -> list[Sequence]:
        """Take the sequences of smaller cohorts, to be computed again in one batch with a new wave.

        A sequence is computed again at most once for every doubling of its cohort. Sequences whose weights have changed
        keep their keys and values.
        """
        found: list[Sequence] = []
        while self.pads and self.cohorts and len(self.cohorts[-1].sequences) <= len(wave) + len(found):
            running = self._running(self.cohorts[-1])
            if any(sequence.outdated for sequence in running):
                break
            found += running
            self.cohorts.pop()
        return found

    def _running(self, cohort: _Cohort) -> list[Sequence]:
        later = {s for other in self.cohorts if other is not cohort for s in other.sequences}
        return [s for s in cohort.sequences if s.arena is not None and s not in later]

    def _computed(self, rows: Seq[Seq[int]]) -> tuple[list[torch.Tensor], _Cohort]:
        """Return the hidden states of each row of token ids, and their cohort, padded on the left."""
        distinct = {tuple(row): i for i, row in enumerate(dict.fromkeys(map(tuple, rows)))}
        longest = max(map(len, distinct))
        ids = torch.zeros(len(distinct), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for i, row in enumerate(distinct):
            ids[i, longest - len(row) :], mask[i, longest - len(row) :] = torch.tensor(row), 1
        ids, mask = ids.to(self.device), mask.to(self.device)
        inputs: dict[str, Any] = {}
        if not bool(mask.all()):
            inputs = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp_(min=0)}
        out = self.model.states(ids, use_cache=True, **inputs)
        cohort = _Cohort([], getattr(out, self._cache_name), mask if inputs else None)
        index = [distinct[tuple(row)] for row in rows]
        if index != list(range(len(distinct))):
            cohort.select(index, self.device)
        return [out.last_hidden_state[i, longest - len(row) :] for i, row in zip(index, rows)], cohort

    def _decoded(self, cohort: _Cohort, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Feed a token [n] at its position [n] to each row; return hidden states [n, hidden]."""
        inputs: dict[str, Any] = {self._cache_name: cohort.cache}
        if self._takes_positions:
            inputs["position_ids"] = positions[:, None].to(self.device)
        if cohort.mask is not None:
            cohort.mask = torch.cat((cohort.mask, cohort.mask.new_ones(len(tokens), 1)), dim=1)
            inputs["attention_mask"] = cohort.mask
        states = self.model.states(tokens[:, None].to(self.device), use_cache=True, **inputs).last_hidden_state
        last: torch.Tensor = states[:, -1]
        return last

    def decode_batch(self, arenas: Seq[Arena]) -> DecodeBatch:
        """Return the running sequences as a batch, without the rows of ended ones."""
        for cohort in list(self.cohorts):
            running = self._running(cohort)
            if not running:
                self.cohorts.remove(cohort)
            elif len(running) < len(cohort.sequences):
                kept = set(running)
                cohort.select([i for i, s in enumerate(cohort.sequences) if s in kept], self.device)
                cohort.sequences = running
        return _CohortBatch(self, arenas)


class _CohortBatch(DecodeBatch):
    """A `DecodeBatch` whose sequences are in the order of the cohorts."""

    def __init__(self, runner: TransformersRunner, arenas: Seq[Arena]) -> None:
        super().__init__(runner.device, arenas, [s for cohort in runner.cohorts for s in cohort.sequences])
        self._runner = runner

    def run(self) -> torch.Tensor:
        """Return logits [B, vocab] of the next tokens."""
        cohorts = self._runner.cohorts
        sizes = [len(cohort.sequences) for cohort in cohorts]
        parts = zip(cohorts, torch.split(self.tokens, sizes), torch.split(self.positions, sizes), strict=True)
        return self._runner.logits(torch.cat([self._runner._decoded(*part) for part in parts]))
