"""The engine without an event loop: it takes requests, advances step by step, and returns finished sequences.

`EmbeddedEngine` drives it; tests call it directly. A step is a prefill if sequences were admitted, else one token for
every running sequence. Weights may change between two steps. Running sequences keep their keys and values and continue
with the new weights, and every token records the version that sampled it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from slime_core.errors import ConfigError, EngineError, WeightSyncError
from slime_core.models.config import ModelConfig
from slime_core.models.hf_io import read_weights
from slime_core.sample.routed_experts import RoutedExperts
from slime_core.weights.sync import tensor_checksum
from slime_embedded.engine.fused_runner import FusedRunner, kernels_for
from slime_embedded.engine.kv_cache import KVCache
from slime_embedded.engine.memory import EngineMemory
from slime_embedded.engine.model_runner import DecodeBatch, ModelRunner, note_routed
from slime_embedded.engine.prefix_cache import PrefixCache
from slime_embedded.engine.sampler import SamplingBatch, derive_seed
from slime_embedded.engine.sampling_params import SamplingParams
from slime_embedded.engine.scheduler import Scheduler
from slime_embedded.engine.sequence import Sequence, TextStream, decode
from slime_embedded.engine.weights import FusedWeights

if TYPE_CHECKING:
    from slime_embedded.engine.adapters import AdapterRunner, AdapterWeights
    from slime_embedded.engine.cohorts import TransformersRunner, TransformersWeights
    from slime_embedded.engine.constraints import Constraints
    from slime_embedded.engine.invariant_runner import InvariantRunner
    from slime_embedded.hf.model import TransformersModel

PAUSE_MODES = ("abort", "in_place", "retract")
_KV_BYTES = 4 << 30
"""Default bound on stored keys and values, in bytes; with rows kept for reuse, memory reaches three times this."""


@dataclass(frozen=True)
class CoreOptions:
    """Limits and defaults of an engine; None means that the model determines the value."""

    max_running: int = 256
    max_tokens: int | None = None
    """KV budget in tokens."""
    max_context: int | None = None
    prefix_cache: bool = True
    batch_invariant: bool = False
    """Make log-probs bit-identical in every batch and to the trainer's (`models.batch_invariant`); slower."""
    sampling_mask: bool = False
    """Keep the candidates of every sampled token, and compute log-probs of the softmax over the candidates."""
    seed: int = 0
    """Seed from which requests without `sampling_seed` draw their own."""


class EngineCore:
    """A generation engine with a model on a device."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Iterable[tuple[str, torch.Tensor]],
        *,
        tokenizer: Any = None,
        eos_ids: Iterable[int] = (),
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        options: CoreOptions | None = None,
        origin: str = "weights",
        model: TransformersModel | None = None,
        adapters: Seq[str] = (),
    ) -> None:
        options = options or CoreOptions()
        device = torch.device(device)
        self.config, self.tokenizer = config, tokenizer
        self.eos_ids = frozenset(eos_ids)
        self.weight_version = 0
        self.version_label = "0"
        """`weight_version` as reported; it differs if a caller of the HTTP API gave another name."""
        self._adapters = ("", *adapters)
        self._weights: FusedWeights | AdapterWeights | TransformersWeights
        self.runner: ModelRunner | InvariantRunner | AdapterRunner | TransformersRunner
        new_cache: Callable[..., KVCache]
        with torch.inference_mode():
            if model is not None:
                from slime_embedded.engine.cohorts import CohortCache, TransformersRunner, TransformersWeights

                self._weights, self.runner = (
                    TransformersWeights(model),
                    TransformersRunner(config, model, device, dtype),
                )
                new_cache = partial(CohortCache, self.runner)
            else:
                kernels = kernels_for(config, device, dtype, options.batch_invariant)

                def new_runner(fused: FusedWeights) -> ModelRunner | InvariantRunner:
                    if options.batch_invariant:
                        from slime_embedded.engine.invariant_runner import InvariantRunner

                        return InvariantRunner(config, fused, device)
                    return (FusedRunner if kernels else ModelRunner)(config, fused, device, dtype)

                parts = {name: FusedWeights(config, device, dtype, kernels) for name in self._adapters}
                self._weights = parts[""]
                if adapters:
                    from slime_embedded.engine.adapters import AdapterRunner, AdapterWeights

                    self._weights = AdapterWeights(parts)
                self._weights.update(weights, origin)
                runners = {name: new_runner(fused) for name, fused in parts.items()}
                self.runner = AdapterRunner(runners) if adapters else runners[""]
                new_cache = partial(KVCache, config, device, self.runner.kv_dtype)
            self.max_context, max_tokens = self._limits(options)
            cache = new_cache(max_tokens=max_tokens, max_context=self.max_context)
        self.memory = EngineMemory(self._weights, self.runner, cache)
        self._prefixes = PrefixCache() if options.prefix_cache and model is None else None
        self.scheduler = Scheduler(cache, self._prefixes, options.max_running)
        self._options = options
        self._num_drawn = 0
        self._batch: DecodeBatch | None = None
        self._sampling: SamplingBatch | None = None
        self._sequences: dict[str, Sequence] = {}
        self.paused = False
        self.num_generated = 0
        """Number of tokens sampled since the start."""

    def _limits(self, options: CoreOptions) -> tuple[int, int]:
        config = self.config
        context = min(options.max_context or config.max_position_embeddings, config.max_position_embeddings)
        per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * self.runner.kv_dtype.itemsize
        max_tokens = options.max_tokens or max(64, _KV_BYTES // per_token)
        if options.max_running < 1:
            raise ConfigError(f"--engine-max-running-requests {options.max_running}: must be at least 1")
        if max_tokens < 64:
            raise ConfigError(f"--engine-max-tokens {max_tokens}: must be at least 64, one row of the KV cache")
        return min(context, max_tokens), max_tokens

    @cached_property
    def constraints(self) -> Constraints:
        """Factory of constraints for requests with a JSON schema or a regular expression."""
        from slime_embedded.engine.constraints import Constraints

        return Constraints(self.tokenizer, self.config.vocab_size, self.eos_ids)

    # -- requests --------------------------------------------------------------------------------------

    def add_request(
        self,
        input_ids: Seq[int],
        sampling_params: Mapping[str, Any] | SamplingParams,
        rid: str,
        *,
        streaming: bool = False,
        logprob_start: int | None = None,
        top_logprobs: int = 0,
        adapter: str | None = None,
    ) -> Sequence:
        """Queue a request, for the shared adapter or the one named.

        Raises:
            EngineError: The prompt, the parameters or the adapter are invalid, or too long for the context.
        """
        if (adapter or "") not in self._adapters:
            known = ", ".join(self._adapters[1:]) or "none"
            raise EngineError(f"adapter {adapter!r} is not served; --lora-adapters has {known}")
        given = sampling_params
        params = given if isinstance(given, SamplingParams) else SamplingParams.parse(given)
        prompt = self._check_prompt(input_ids, params, logprob_start, top_logprobs)
        if rid in self._sequences:
            raise EngineError(f"rid {rid!r} is already running; request ids must be unique")
        if params.stop and self.tokenizer is None:
            raise EngineError("sampling_params: stop strings need a tokenizer, and the model directory has none")
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.eos_ids)
        sequence = Sequence(
            rid=rid,
            prompt_ids=prompt,
            params=params,
            seed=self._draw_seed() if params.sampling_seed is None else params.sampling_seed & (2**64 - 1),
            limit=min(params.max_new_tokens, self.max_context - len(prompt)),
            stop_ids=frozenset(t for t in stop_ids if 0 <= t < self.config.vocab_size),
            logprob_start=logprob_start,
            top_logprobs=top_logprobs,
            streaming=streaming,
            adapter=adapter or "",
            constraint=self.constraints.make(params) if params.constrained else None,
            kept=[] if self._options.sampling_mask else None,
            text_stream=TextStream(self.tokenizer, params) if params.stop or streaming else None,
        )
        sequence.mark_version(self.weight_version)
        self._sequences[rid] = sequence
        self.scheduler.waiting.append(sequence)
        return sequence

    def _check_prompt(
        self, input_ids: Seq[int], params: SamplingParams, logprob_start: int | None, top_logprobs: int
    ) -> list[int]:
        prompt, vocab = list(input_ids), self.config.vocab_size
        if not prompt:
            raise EngineError("input_ids is empty; a request needs at least one token")
        if not all(type(t) is int and 0 <= t < vocab for t in prompt):
            bad = next(t for t in prompt if type(t) is not int or not 0 <= t < vocab)
            raise EngineError(f"input_ids contains {bad!r}; allowed: integers from 0 to {vocab - 1}")
        if len(prompt) + min(params.max_new_tokens, 1) > self.max_context:
            raise EngineError(
                f"the prompt has {len(prompt)} tokens, but the context holds {self.max_context}"
                " (max_position_embeddings and --engine-max-tokens), one of them for the answer"
            )
        if params.n != 1:
            raise EngineError(f"sampling_params: n is {params.n}; one request generates one answer here")
        if logprob_start is not None and not 0 <= logprob_start < len(prompt):
            raise EngineError(f"logprob_start_len is {logprob_start}; the prompt has {len(prompt)} tokens")
        if not 0 <= top_logprobs <= vocab:
            raise EngineError(f"top_logprobs_num is {top_logprobs}; allowed: 0 to {vocab}")
        return prompt

    def _draw_seed(self) -> int:
        self._num_drawn += 1
        return derive_seed(self._options.seed, self._num_drawn)

    def abort(self, rid: str | None = None) -> list[Sequence]:
        """End one request (no effect if it is gone), or all, and return the ended sequences."""
        chosen = list(self._sequences.values()) if rid is None else [s for s in (self._sequences.get(rid),) if s]
        for sequence in chosen:
            self._end(sequence, {"type": "abort", "message": "aborted by request"})
        return chosen

    @property
    def has_work(self) -> bool:
        """Whether a step has any work."""
        return bool(self._sequences) and not self.paused and not self.memory.released

    @property
    def num_running(self) -> int:
        """Number of sequences with a row in the cache."""
        return self.scheduler.num_running

    @property
    def num_waiting(self) -> int:
        """Number of sequences in the queue."""
        return len(self.scheduler.waiting)

    # -- stepping --------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[Sequence]:
        """Advance by one step and return the sequences that got tokens or ended."""
        if not self.has_work:
            return []
        admission = self.scheduler.admit()
        if admission.sequences:
            self._batch = None
            return self._prefill(admission.sequences, admission.starts, admission.twins)
        return self._decode()

    def _prefill(
        self, sequences: list[Sequence], starts: list[int], twins: list[tuple[Sequence, Sequence]]
    ) -> list[Sequence]:
        hidden = self.runner.prefill(sequences, starts)
        for sequence, states, start in zip(sequences, hidden, starts):
            if sequence.logprob_start is not None and sequence.num_output == 0:
                self._score_prompt(sequence, states, start)
        index = {sequence: i for i, sequence in enumerate(sequences)}
        picks = list(range(len(sequences)))
        for twin, leader in twins:
            twin.take_row_of(leader)
            picks.append(index[leader])
        self.scheduler.prefilled(sequences)
        everyone = sequences + [twin for twin, _ in twins]
        logits = self.runner.logits(torch.stack([states[-1] for states in hidden]))
        sampling = [i for i, s in enumerate(everyone) if s.limit > 0]
        for sequence in everyone:
            if sequence.limit == 0:
                self._end(sequence, {"type": "length", "length": 0})
        chosen = [everyone[i] for i in sampling]
        if chosen:
            batch = SamplingBatch(chosen, logits.device, self.runner.score_tokens)
            tokens, log_probs = batch.sample(logits[[picks[i] for i in sampling]])
            self._append(chosen, tokens.tolist(), log_probs.tolist())
        return everyone

    def _score_prompt(self, sequence: Sequence, states: torch.Tensor, start: int) -> None:
        """Compute log-probs of the prompt tokens after `logprob_start`, at the request's temperature (greedy: 1).

        With `top_logprobs` also those of the likeliest tokens in their places.
        """
        assert sequence.logprob_start is not None
        assert start <= sequence.logprob_start
        targets = torch.tensor(sequence.prompt_ids[sequence.logprob_start + 1 :], device=states.device)
        states = states[sequence.logprob_start - start : len(sequence.prompt_ids) - 1 - start]
        sequence.prompt_log_probs, sequence.prompt_top = [], []
        scale = 1.0 if sequence.params.greedy else sequence.params.temperature
        for part, ids in zip(torch.split(states, 512), torch.split(targets, 512)):
            scores = (self.runner.logits(part).float() / scale).log_softmax(dim=-1)
            sequence.prompt_log_probs.extend(scores.gather(1, ids[:, None]).squeeze(1).tolist())
            if sequence.top_logprobs:
                top = scores.topk(sequence.top_logprobs)
                pairs = zip(top.values.tolist(), top.indices.tolist())
                sequence.prompt_top.extend(list(zip(*pair)) for pair in pairs)

    def _decode(self) -> list[Sequence]:
        if self._batch is None or self._batch.steps_left <= 0:
            self.scheduler.make_room()
            self._batch = self.runner.decode_batch(list(self.scheduler.cache.arenas.values()))
            self._sampling = SamplingBatch(self._batch.sequences, self.runner.device, self.runner.score_tokens)
        batch, sampling = self._batch, self._sampling
        assert sampling is not None
        logits = batch.run()
        note_routed(self.runner.routed, ((s, len(s.tokens) - 1, len(s.tokens)) for s in batch.sequences))
        tokens, log_probs = sampling.sample(logits)
        batch.advance(tokens)
        self._append(batch.sequences, tokens.tolist(), log_probs.tolist())
        return batch.sequences

    def _append(self, sequences: list[Sequence], tokens: list[int], log_probs: list[float]) -> None:
        self.num_generated += len(tokens)
        # In reverse order: the last row fills the row of an ended sequence, and the last may end now as well.
        for sequence, token, log_prob in zip(reversed(sequences), reversed(tokens), reversed(log_probs)):
            sequence.tokens.append(token)
            sequence.log_probs.append(log_prob)
            ends = token in sequence.stop_ids or len(sequence.log_probs) >= sequence.limit
            if ends or sequence.constraint is not None or sequence.text_stream is not None or log_prob != log_prob:
                self._check_end(sequence, token, log_prob)

    def _check_end(self, sequence: Sequence, token: int, log_prob: float) -> None:
        complete = sequence.constraint is not None and not sequence.constraint.goes_on(token)
        if log_prob != log_prob:
            self._fail(sequence, "the model's logits are not finite; the weights it was given have diverged")
            return
        stream = sequence.text_stream
        if stream is not None:
            ended = complete or token in sequence.stop_ids or sequence.num_output >= sequence.limit
            shown = self._shown_ids(sequence) if ended else sequence.output_ids
            match = stream.update(shown, final=ended)
            if match is not None and sequence.num_output >= sequence.params.min_new_tokens:
                sequence.stop_match = match
                self._end(sequence, {"type": "stop", "matched": match})
                return
        if complete or token in sequence.stop_ids:
            self._end(sequence, {"type": "stop", "matched": token if token in sequence.stop_ids else None})
        elif sequence.num_output >= sequence.limit:
            self._end(sequence, {"type": "length", "length": sequence.num_output})

    def _end(self, sequence: Sequence, reason: dict[str, Any]) -> None:
        sequence.finish = reason
        with torch.inference_mode():
            self.scheduler.finish(sequence, keep=not sequence.outdated)
        self._sequences.pop(sequence.rid, None)
        self._batch = None

    def _fail(self, sequence: Sequence, message: str) -> None:
        sequence.error = message
        sequence.finish = {"type": "abort", "message": message}
        self.scheduler.cache.wipe(sequence)
        self.scheduler.finish(sequence, keep=False)
        self._sequences.pop(sequence.rid, None)
        self.flush_cache()
        self._batch = None

    # -- answers ---------------------------------------------------------------------------------------

    def _shown_ids(self, sequence: Sequence) -> list[int]:
        """Return the output ids without the stop token, unless it is kept."""
        ids = sequence.output_ids
        if ids and ids[-1] in sequence.stop_ids and not sequence.params.no_stop_trim:
            return ids[:-1]
        return ids

    def text(self, sequence: Sequence) -> str:
        """Return the sequence's text: all of it after the end, only complete characters before the end."""
        stream = sequence.text_stream
        if stream is not None and sequence.stop_match is not None:
            end = (stream.stop_at or 0) + (len(sequence.stop_match) if sequence.params.no_stop_trim else 0)
            return stream.text[:end]
        if sequence.finish is None and stream is not None:
            return stream.safe_text
        return decode(self.tokenizer, self._shown_ids(sequence), sequence.params)

    def routed_experts(self, sequence: Sequence) -> RoutedExperts:
        """Return the experts of every token but the last; unknown if the sequence ended before they were computed."""
        moe, rows = self.config.moe, len(sequence.tokens) - 1
        assert moe is not None, "asked of a dense model"
        if sequence.routed is None:
            return RoutedExperts.free(rows, self.config.num_layers, moe.experts_per_token)
        return RoutedExperts.of(sequence.routed[: sequence.num_routed]).extended(rows)

    # -- control ---------------------------------------------------------------------------------------

    def pause(self, mode: str = "in_place") -> list[Sequence]:
        """Stop stepping: end all requests, keep them unchanged, or make them give up their rows."""
        if mode not in PAUSE_MODES:
            raise EngineError(f"pause mode {mode!r}; allowed: {', '.join(PAUSE_MODES)}")
        ended = self.abort() if mode == "abort" else []
        if mode == "retract":
            with torch.inference_mode():
                for sequence in reversed(self.scheduler.running):
                    self.scheduler.preempt(sequence)
            self._batch = None
        self.paused = True
        return ended

    def resume(self) -> None:
        """Resume stepping."""
        self.paused = False

    def flush_cache(self) -> None:
        """Forget all prefixes; running requests keep their own keys and values."""
        if self._prefixes is not None:
            self._prefixes.clear()

    def release_memory(self, tags: Seq[str] | None = None) -> None:
        """Free the memory that the tags name, cached prefixes included. Raises EngineError if there are requests."""
        if self._sequences:
            raise EngineError(f"{len(self._sequences)} requests are in the engine, which needs its memory for them")
        self.flush_cache()
        self._batch = self._sampling = None
        self.memory.release(tags)

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int, origin: str) -> None:
        """Replace all weights, or raise WeightSyncError and change nothing."""
        if not self.memory.has_weights:
            raise WeightSyncError(f"{origin}: the weights' memory is released; resume_memory() comes first")
        self._weights.update(weights, origin)
        self.runner.weights_changed()
        self.memory.updated()
        for sequence in self.scheduler.running:
            sequence.outdated = True
        self.set_version(version)
        self.flush_cache()

    def update_weights_from_disk(self, directory: Path, version: int) -> None:
        """Replace all weights by those of an HF-layout directory, or raise WeightSyncError and change nothing."""
        try:
            weights = list(read_weights(directory))
        except (ConfigError, OSError) as error:
            raise WeightSyncError(f"{error}; the old weights still serve") from error
        self.update_weights(weights, version, str(directory))

    def set_version(self, version: int, label: str | None = None) -> None:
        """Set the version of tokens from now on; `label` is the value that `weight_version` reports."""
        self.weight_version = version
        self.version_label = str(version) if label is None else label
        for sequence in self._sequences.values():
            sequence.mark_version(version)

    def weight_checksums(self) -> dict[str, str]:
        """Return checksums by HF name, of tensors in the engine's dtype. Raises EngineError if weights are released."""
        if not self.memory.has_weights:
            raise EngineError("the weights are released")
        # Of copies: a checksum makes NumPy arrays, and memory behind a NumPy array can no longer be released.
        return {name: tensor_checksum(tensor.clone()) for name, tensor in self._weights.named()}
