"""Conversations built token by token, from context tokens and tokens that the policy sampled.

Generators and agent sessions build a `Trajectory` and `write` it into samples. A trajectory only grows: tokens sent to
the engine stay the prefix of all later tokens, so the trainer sees each sampled token after exactly the tokens that
preceded it when it was sampled. Columns here cover *all* tokens; `write` cuts off the prompt's part. The loss mask
cannot be set. Only `replace_lossy` can replace sampled ids: it also drops all later tokens, and adds a note to
`metadata["lossy"]`.

::

    trajectory = Trajectory.of(sample)                            # the prompt
    output = await engine.generate(trajectory.tokens, params)
    trajectory.add_sampled(output)                                # trained
    for ids, source in turn_delta(...):                           # slime_core.turn_delta
        trajectory.add(ids, source)                               # context
    trajectory.write(sample)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING, Any

from slime_core.sample import GenerationOutput, Sample, provenance
from slime_core.sample.provenance import NOT_SAMPLED, POSITIVE_LOG_PROB, TRAINABLE, Source, Spans
from slime_core.sample.routed_experts import RoutedExperts, routed_experts_after_call

if TYPE_CHECKING:
    from slime_core.protocols import Args


class Trajectory:
    """Tokens, each with source, log-prob and weight version; tokens are appended at the end."""

    def __init__(self, args: Args | None = None) -> None:
        self.args = args
        """The settings; only MoE routing replay with SGLang's encoding reads them (`hf_checkpoint`)."""
        self.prompt_length = 0
        """Number of tokens before the first response, set by `of`; the default `prompt_length` of `write`."""
        self.metadata: dict[str, Any] = {}
        """Entries that `write` adds to the samples' metadata."""
        self._tokens: list[int] = []
        self._log_probs: list[float] = []
        self._versions: list[int] = []
        self._spans: Spans = []
        self._texts: list[tuple[int, str]] = []
        self._calls: list[tuple[Mapping[str, Any], int]] = []
        self._kept: list[Sequence[int]] | None = []
        """[n] candidate ids from which each token was sampled; None if unknown for any sampled token."""
        self._routed: RoutedExperts | None = None
        self._known_log_probs = True

    @classmethod
    def of(cls, sample: Sample, args: Args | None = None) -> Trajectory:
        """Build a trajectory from a sample's tokens: its prompt, and a partial response to continue if there is one.

        Raises:
            ValueError: The sample's fields do not fit together.
        """
        sample.validate()
        made = cls(args)
        made.prompt_length = before = len(sample.tokens) - sample.response_length
        made._tokens, made._spans = list(sample.tokens), sample.known_spans()
        covered = provenance.num_tokens(made._spans)
        if covered != len(sample.tokens):
            raise ValueError(f"sample {sample.index}: spans cover {covered} of {len(sample.tokens)} tokens")
        known = sample.rollout_log_probs
        made._known_log_probs = known is not None or not sample.response_length
        made._log_probs = [0.0] * before + list(known if known is not None else [0.0] * sample.response_length)
        versions = sample.token_weight_versions or [
            v for s in provenance.part(made._spans, before, len(sample.tokens))
            for v in [0 if s.source == Source.SAMPLED else NOT_SAMPLED] * s.length
        ]  # fmt: skip
        made._versions = [NOT_SAMPLED] * before + list(versions)
        made._texts = [(before, sample.response)] if sample.response else []
        made._kept = [()] * len(sample.tokens)
        if sample.rollout_top_p_token_offsets is not None:
            bounds = pairwise(sample.rollout_top_p_token_offsets)
            made._kept[before:] = [(sample.rollout_top_p_token_ids or [])[a:b] for a, b in bounds]
        elif any(span.source == Source.SAMPLED for span in made._spans):
            made._kept = None
        if sample.rollout_routed_experts is not None:
            made._routed = RoutedExperts.of(sample.rollout_routed_experts)
        return made

    # -- reading -------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def tokens(self) -> list[int]:
        """[n] all ids, a copy: the input of the next engine call."""
        return self._tokens.copy()

    @property
    def log_probs(self) -> list[float]:
        """[n] log-probs in nats; 0.0 for tokens that were not sampled."""
        return self._log_probs.copy()

    @property
    def weight_versions(self) -> list[int]:
        """[n] weight versions; `NOT_SAMPLED` for tokens that were not sampled."""
        return self._versions.copy()

    @property
    def spans(self) -> Spans:
        """The sources of all tokens."""
        return self._spans.copy()

    @property
    def loss_mask(self) -> list[int]:
        """[n] 1 for trained tokens; derived from `spans`."""
        return provenance.loss_mask(self._spans)

    @property
    def texts(self) -> list[tuple[int, str]]:
        """(first token, text) of each piece that was added with a text."""
        return self._texts.copy()

    @property
    def last_version(self) -> int:
        """Weight version of the newest sampled token; `NOT_SAMPLED` without sampled tokens."""
        return max(self._versions, default=NOT_SAMPLED)

    def begins(self, ids: Sequence[int]) -> bool:
        """Return whether these tokens are a prefix of `ids`, so that the rest of `ids` can be added."""
        return len(ids) >= len(self._tokens) and list(ids[: len(self._tokens)]) == self._tokens

    # -- growing -------------------------------------------------------------------------------------

    def add(self, ids: Sequence[int], source: Source, text: str = "") -> None:
        """Append context, which is never trained. For an assistant's text that was not sampled, use DEMONSTRATION.

        Raises:
            ValueError: The source is SAMPLED, or `ids` are not token ids.
        """
        source = Source(source)
        if source == Source.SAMPLED:
            raise ValueError("sampled tokens are added by add_sampled, with their log-probs and versions")
        self._extend(ids, source, "context" if source in TRAINABLE else "", text)
        self._log_probs += [0.0] * len(ids)
        self._versions += [NOT_SAMPLED] * len(ids)
        if self._kept is not None:
            self._kept += [()] * len(ids)
        if self._routed is not None:
            self._routed = self._routed.extended(max(0, len(self._tokens) - 1))

    def add_sampled(
        self,
        output: GenerationOutput | Sequence[int],
        log_probs: Sequence[float] | None = None,
        versions: Sequence[int] | int | None = None,
        *,
        text: str = "",
        meta_info: Mapping[str, Any] | None = None,
    ) -> None:
        """Append tokens that an engine sampled after exactly the current tokens.

        Args:
            output: The engine's output, or [n] token ids with the other arguments.
            log_probs: [n] log-probs of the sampling policy, in nats.
            versions: [n] weight versions, or one for all tokens; taken from `meta_info` when absent.
            text: Text of the tokens.
            meta_info: The engine's metadata of the call.

        Raises:
            ValueError: Lengths differ, a log-prob is not a finite number <= 0, or a version is older than an earlier
                one; nothing is changed.
        """
        if isinstance(output, GenerationOutput):
            ids, log_probs, text, meta_info = output.token_ids, output.log_probs, output.text, output.meta_info
        else:
            ids = list(output)
        meta_info = meta_info or {}
        if log_probs is None or len(log_probs) != len(ids):
            raise ValueError(f"{len(ids)} sampled tokens but {0 if log_probs is None else len(log_probs)} log-probs")
        if not math.isfinite(sum(log_probs)) or max(log_probs, default=0.0) > POSITIVE_LOG_PROB:
            raise ValueError("log-probs of sampled tokens must be finite numbers <= 0")
        numbers = self._checked_versions(len(ids), versions, meta_info)
        if not self._known_log_probs:
            raise ValueError("the tokens before were sampled without log-probs; those of these could not be kept")
        kept = meta_info.get("output_token_sampling_mask")
        if kept is not None and len(kept) != len(ids):
            raise ValueError(f"{len(ids)} sampled tokens but {len(kept)} sampling masks")
        routed = routed_experts_after_call(self._routed, meta_info, len(self._tokens) + len(ids), self.args)
        self._extend(ids, Source.SAMPLED, "", text)
        self._routed = routed
        if ids:
            self._kept = None if kept is None or self._kept is None else [*self._kept, *kept]
        self._log_probs += map(float, log_probs)
        self._versions += numbers
        self._calls.append((meta_info, len(ids)))

    def _checked_versions(
        self, count: int, versions: Sequence[int] | int | None, meta_info: Mapping[str, Any]
    ) -> list[int]:
        if versions is None:
            versions = meta_info.get("token_weight_versions")
        if versions is None:
            versions = provenance.version_number(meta_info.get("weight_version"))
        numbers = [versions] * count if isinstance(versions, int) else [int(v) for v in versions]
        if len(numbers) != count:
            raise ValueError(f"{count} sampled tokens but {len(numbers)} weight versions")
        last = self.last_version
        if numbers and (numbers != sorted(numbers) or numbers[0] < max(last, 0)):
            raise ValueError(f"weight versions must not decrease: {numbers[:8]} after {last}")
        return numbers

    def _extend(self, ids: Sequence[int], source: Source, withheld: str, text: str) -> None:
        _check_ids(ids)
        if text:
            self._texts.append((len(self._tokens), text))
        self._tokens += ids
        provenance.add_span(self._spans, source, len(ids), withheld)

    # -- branching and giving up ---------------------------------------------------------------------

    def fork(self) -> Trajectory:
        """Return an independent copy; both can continue from the current tokens."""
        copy = Trajectory(self.args)
        copy.__dict__.update(self.__dict__)
        for name in ("_tokens", "_log_probs", "_versions", "_spans", "_texts", "_calls"):
            setattr(copy, name, getattr(self, name).copy())
        copy._kept = None if self._kept is None else self._kept.copy()
        copy.metadata = {k: v.copy() if isinstance(v, list | dict) else v for k, v in self.metadata.items()}
        return copy

    def withhold(self, first: int, last: int, reason: str) -> None:
        """Exclude tokens [first, last) from training, counted from the beginning of the trajectory.

        Raises:
            ValueError: The range is outside the trajectory, or `reason` is empty.
        """
        if not 0 <= first <= last <= len(self._tokens):
            raise ValueError(f"no tokens {first} to {last}; the trajectory has {len(self._tokens)}")
        self._spans = provenance.withhold(self._spans, first, last, reason)

    def replace_lossy(self, start: int, ids: Sequence[int], reason: str) -> None:
        """Replace all tokens from `start` on, including sampled tokens, by `ids`, which are not trained.

        For histories that a client or a template rewrote. Tokens sampled before `start` stay trained.
        `metadata["lossy"]` gets {start, dropped, sampled, added, reason}, with the numbers of tokens.

        Raises:
            ValueError: `start` is outside the trajectory, `reason` is empty, or `ids` are not token ids; nothing is
                changed.
        """
        if not 0 <= start <= len(self._tokens) or not reason:
            raise ValueError(f"replace_lossy({start}, ..., {reason!r}): the trajectory has {len(self._tokens)} tokens,"
                             " and a reason is needed")  # fmt: skip
        _check_ids(ids)
        gone = provenance.part(self._spans, start, len(self._tokens))
        note = {
            "start": start,
            "dropped": len(self._tokens) - start,
            "sampled": sum(s.length for s in gone if s.source == Source.SAMPLED),
            "added": len(ids),
            "reason": reason,
        }
        self._spans = provenance.part(self._spans, 0, start)
        del self._tokens[start:], self._log_probs[start:], self._versions[start:]
        if self._kept is not None:
            del self._kept[start:]
        self._texts = [(at, text) for at, text in self._texts if at < start]
        self.prompt_length = min(self.prompt_length, start)
        if self._routed is not None:
            self._routed = self._routed.extended(max(0, min(len(self._routed), start - 1)))
        self.add(ids, Source.TEMPLATE)
        self.metadata["lossy"] = [*self.metadata.get("lossy", ()), note]

    # -- writing -------------------------------------------------------------------------------------

    def write(self, sample: Sample, prompt_length: int | None = None) -> Sample:
        """Write this trajectory into the sample; update status and counters from the engine calls added since `of`.

        Args:
            sample: Changed in place and returned. Its other fields are unchanged.
            prompt_length: Number of prompt tokens, which are not trained; by default `self.prompt_length`.

        Raises:
            ValueError: `prompt_length` exceeds the number of tokens.
        """
        start = self.prompt_length if prompt_length is None else prompt_length
        if not 0 <= start <= len(self._tokens):
            raise ValueError(f"prompt_length {start}; the trajectory has {len(self._tokens)} tokens")
        length = len(self._tokens) - start
        sample.rollout_top_p_token_ids = sample.rollout_top_p_token_offsets = None
        if self._kept is not None and any(span.source == Source.SAMPLED for span in self._spans):
            sample.rollout_top_p_token_ids = list(chain.from_iterable(self._kept[start:]))
            sample.rollout_top_p_token_offsets = list(accumulate(map(len, self._kept[start:]), initial=0))
        if sample.prompt_tokens != self._tokens[:start] or self._tokens[: len(sample.tokens)] != sample.tokens:
            sample.turns = None  # their tokens were replaced
        sample.tokens, sample.spans, sample.response_length = self.tokens, self.spans, length
        sample.loss_mask = provenance.loss_mask(self._spans, start)
        sample.sampled_after = provenance.digest(self._tokens[:start])
        sample.rollout_log_probs = self._log_probs[start:] if self._known_log_probs else None
        sample.token_weight_versions = self._versions[start:]
        sample.rollout_routed_experts = self._routed
        sample.response = "".join(text for at, text in self._texts if at >= start)
        if sample.teacher_log_probs is not None and len(sample.teacher_log_probs) != length:
            sample.teacher_log_probs = None
        if self.metadata:
            sample.metadata = {**sample.metadata, **self.fork().metadata}
        for meta_info, num_tokens in self._calls:
            sample.take_meta_info(meta_info, num_tokens)
        return sample


def _check_ids(ids: Sequence[int]) -> None:
    if not {int}.issuperset(map(type, ids)) or min(ids, default=0) < 0:
        raise ValueError("token ids must be integers >= 0")
