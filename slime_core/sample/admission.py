"""Admission to training: the invariants of every sample that is trained on, whatever code made the sample.

`rollout/batch.py` calls `admit` once for the samples that become a batch: generated, loaded or supervised. The sample
runner calls `problem` as soon as a sample has been generated, so that a bad sample counts as a failure like others. A
sample that breaks an invariant becomes FAILED with the reason and trains nothing; the run continues.

The invariants, of tokens [prompt + response]:

1. Spans add up to the tokens.
2. A sampled token of the response has a finite log-prob <= 0, if log-probs are known, and every other token has 0.0.
   The log-probs of a response given as text (`take_text`) are unknown; the trainer's own log-probs replace them.
3. A sampled token has a weight version, if versions are known, and every other token has `NOT_SAMPLED`. Versions never
   decrease.
4. A loss mask holds 0 and 1, and 1 only for tokens that were sampled or given as a demonstration. The spans record the
   tokens that only the mask withholds. The mask cannot enable tokens that the spans withhold.
5. If a sample has images, no sampled token is the image token: the model would look for an image there.
6. Recorded turns follow each other within the response.
7. The status is a `SampleStatus`.
"""

from __future__ import annotations

import copy
import functools
import math
import operator
import weakref
from collections.abc import Iterable, Sequence
from itertools import groupby, pairwise
from typing import Any, NamedTuple

from slime_core.errors import PluginError
from slime_core.sample import provenance
from slime_core.sample.provenance import NOT_SAMPLED, POSITIVE_LOG_PROB, TRAINABLE, Source, Spans
from slime_core.sample.sample import Sample, SampleStatus

WHERE = "admission"
"""`metadata["failure"]["where"]` of samples that are refused."""
_BY_MASK = "loss_mask"
"""Reason recorded for tokens that a supplied loss mask withholds."""
_STATUSES = tuple(SampleStatus)
_IDENTITY = ("index", "group_index", "rollout_id", "row")
_TRAINED_ON = (
    *_IDENTITY, "sampled_after", "weight_versions", "token_weight_versions", "rollout_log_probs", "loss_mask", "spans",
    "rollout_top_p_token_ids", "rollout_top_p_token_offsets", "response_length", "tokens",
)  # fmt: skip
_trained_on = operator.attrgetter(*_TRAINED_ON)
DECLARE = (
    "; if the change is intended, declare it: @declares(EditTraits(edits_samples=True)), or traits = ... in its class"
)


class Drawn(NamedTuple):
    """The input of a generate function, to compare with the sample that it returns."""

    prompt: list[int]
    """Ids of the prompt."""
    num_tokens: int
    """Number of tokens in the prompt and the response so far."""
    spans: Spans | None
    messages: object
    """The prompt itself."""
    num_messages: int

    @classmethod
    def of(cls, sample: Sample) -> Drawn:
        """Record the sample before the call."""
        spans = list(sample.spans) if sample.spans is not None else None
        return cls(sample.prompt_tokens, len(sample.tokens), spans, sample.prompt, len(sample.prompt))

    def has_prompt_of(self, sample: Sample) -> bool:
        """Return whether the sample still has the text or messages that were given."""
        return sample.prompt is self.messages and len(sample.prompt) == self.num_messages

    def problem(self, sample: Sample, *, same: bool) -> str | None:
        """Return the problem of a returned sample, or None if its spans and its prompt are consistent.

        Code that does not know about spans sets the tokens and leaves the spans unchanged: the spans that can no longer
        be true are dropped. If the code set spans, the sampled tokens must follow the prompt that they were appended
        to, which may be a prompt of the code's own. `Trajectory.replace_lossy` marks a deliberate change of the prompt.

        Args:
            sample: The returned sample.
            same: Whether `sample` is the sample that was given; another sample may have its own prompt.
        """
        try:
            prompt_length = len(sample.tokens) - sample.response_length
            kept_prompt = list(sample.tokens[: len(self.prompt)]) == self.prompt
        except TypeError:
            return None  # `settled` reports the error
        if sample.spans == self.spans:
            if not kept_prompt or prompt_length != len(self.prompt):
                sample.spans = None
            elif len(sample.tokens) != self.num_tokens:
                sample.spans = provenance.part(sample.spans or (), 0, prompt_length) or None
            return None
        if kept_prompt or not same or sample.spans is None or "lossy" in sample.metadata:
            return None
        if sample.sampled_after == provenance.digest(sample.prompt_tokens):
            return None
        return (
            "the prompt's tokens are neither those that were drawn nor those that the response was appended to; what"
            " was sampled would be trained on after another prompt. Set sample.tokens to a prompt of your own before"
            " append_response_tokens, or use Trajectory.replace_lossy"
        )


class Sealed:
    """Snapshots of samples before user code sees them, to detect changes of the fields that are trained on.

    These fields are ids, tokens and the values of each token. User code may write reward, metadata, status, text,
    `remove_sample` and `teacher_log_probs`. If it declares `EditTraits(edits_samples=True)`, it may write every field.
    """

    def __init__(self, samples: Iterable[Sample]) -> None:
        self._before = [(sample, snapshot(sample)) for sample in samples]

    def edits(self) -> list[tuple[Sample, str]]:
        """Return the changed samples, each with a description of the change; failed samples are left out."""
        return [(sample, problem) for sample, before in self._before if (problem := changed(sample, before))]

    def check(self, label: str, advice: str = DECLARE) -> None:
        """Raise PluginError if a sample was changed; `label` names the code that saw the samples."""
        for sample, problem in self.edits():
            raise PluginError(f"{label}, sample {sample.index}: {problem}{advice}")


class Held:
    """Samples that user code keeps for a while: recorded when it gets them, checked when it returns them."""

    def __init__(self, label: str, *, edits: bool) -> None:
        """`label` names the code in errors; with `edits` the code may change samples, so nothing is checked."""
        self._label, self._edits = label, edits
        self._before: dict[int, tuple[object, list[object]]] = {}
        """Sample id -> a weak reference, which removes this entry when the sample is freed, and fingerprints."""

    def give(self, samples: Iterable[Sample]) -> None:
        """Record samples; call it before the code gets them."""
        for sample in () if self._edits else samples:
            gone = weakref.ref(sample, functools.partial(self._forget, id(sample)))
            self._before[id(sample)] = gone, _fingerprints(sample)

    def _forget(self, key: int, _: object) -> None:
        self._before.pop(key, None)

    def take(self, samples: Iterable[Sample]) -> None:
        """Raise PluginError if a returned sample was changed."""
        for sample in samples:
            _, before = self._before.pop(id(sample), (None, None))
            if before and (problem := changed(sample, before, _fingerprints(sample))):
                raise PluginError(f"{self._label}, sample {sample.index}: {problem}{DECLARE}")


def changed(sample: Sample, before: Iterable[object], now: Iterable[object] | None = None) -> str | None:
    """Describe a change since `snapshot` made `before`; return None if nothing changed or the sample has failed.

    The identity (index, group, ...) is set back to its old value: the sample is counted under it, failed or not.
    """
    if sample.status == SampleStatus.FAILED and sample.reward is None:
        return None
    problem = None
    for name, old, new in zip(_TRAINED_ON, before, _trained_on(sample) if now is None else now, strict=True):
        if old is not new and old != (new if type(new) is list else _plain(new)):
            problem = f"it changed sample.{name}, and what is trained on must stay what was sampled"
            if name in _IDENTITY:
                setattr(sample, name, old)
    return problem


def snapshot(sample: Sample) -> list[object]:
    """Return independent copies of the fields that are trained on."""
    return [
        v if v is None or type(v) is int
        else v[:] if type(v) is list and not (v and type(v[0]) is list)
        else copy.deepcopy(_plain(v))  # user code may set any value
        for v in _trained_on(sample)
    ]  # fmt: skip


def _plain(value: object) -> object:
    if isinstance(value, tuple):
        return list(value)
    return value.tolist() if hasattr(value, "tolist") else value


def _fingerprints(sample: Sample) -> list[object]:
    """Return a snapshot that takes less memory and more time: lists of numbers are replaced by their hashes."""
    return [hash(tuple(v)) if type(v) is list and v and isinstance(v[0], int | float) else v for v in snapshot(sample)]


def is_text(sample: Sample) -> bool:
    """Return whether the response exists as text only."""
    return bool(sample.response) and sample.response_length == 0 and sample.status != SampleStatus.FAILED


def take_text(sample: Sample, response: list[int]) -> str | None:
    """Set the token ids of a sample whose response is text, as `Source.TEXT`; return a problem, or None.

    The log-probs are unknown. A loss mask of the sample must have an entry for each id. A PENDING sample becomes
    COMPLETED.
    """
    mask = list(sample.loss_mask) if sample.loss_mask is not None else []
    if mask and len(mask) != len(response):
        return (
            f"loss_mask has {len(mask)} entries and the response, given as text, has {len(response)} tokens; leave the"
            " mask out, give one entry for each token, or append ids by append_response_tokens"
        )
    prompt, spans = list(sample.tokens), sample.known_spans()
    if provenance.num_tokens(spans) != len(prompt):
        sample.spans = None
        spans = sample.known_spans()
    provenance.add_span(spans, Source.TEXT, len(response))
    sample.tokens, sample.spans, sample.response_length = prompt + response, spans, len(response)
    sample.loss_mask, sample.rollout_log_probs, sample.token_weight_versions = mask or None, None, []
    sample.sampled_after = provenance.digest(prompt)
    if sample.status == SampleStatus.PENDING:
        sample.status = SampleStatus.COMPLETED
    return None


def admit(samples: Iterable[Sample], image_token: int | None = None) -> list[Sample]:
    """Complete `spans` and derive `loss_mask` of samples that train; return the refused samples, now FAILED.

    Samples that train nothing (failed, or removed by a filter) stay unchanged if their fields are consistent.
    `image_token` is the model's (`multimodal.image_token_of`).
    """
    refused = []
    for sample in samples:
        try:
            if sample.is_removed:
                sample.validate()
                continue
            spans, mask = settled(sample, image_token)
        except (TypeError, ValueError) as error:
            sample.fail(WHERE, str(error))
            sample.spans = None
            refused.append(sample)
            continue
        sample.spans = spans
        if sample.response_length:
            sample.loss_mask = mask
    return refused


def problem(sample: Sample, image_token: int | None = None) -> str | None:
    """Describe the first invariant that the sample breaks, or return None; the sample is not changed."""
    try:
        settled(sample, image_token)
    except (TypeError, ValueError) as error:  # a field of a user's code may hold anything
        return str(error)
    return None


def settled(sample: Sample, image_token: int | None = None) -> tuple[Spans, list[int]]:
    """Return spans of all tokens, which include the loss mask's withheld tokens, and the mask derived from them.

    Raises:
        ValueError: An invariant does not hold, or the sample's status is no `SampleStatus`.
        TypeError: A field does not hold numbers.
    """
    sample.validate()
    if sample.status not in _STATUSES:
        raise ValueError(f"status is {sample.status!r:.80}; one of {', '.join(_STATUSES)}")
    spans = sample.known_spans()
    num_tokens, covered = len(sample.tokens), provenance.num_tokens(spans)
    if covered != num_tokens:
        raise ValueError(
            f"spans cover {covered} tokens and the sample has {num_tokens}; extend it by append_response_tokens or"
            " a Trajectory, or set spans to None, to have them derived from loss_mask and token_weight_versions"
        )
    prompt_length = num_tokens - sample.response_length
    if sample.response_length and not prompt_length:
        raise ValueError("no prompt tokens; sample.tokens must hold prompt and response")
    _check_columns(sample, spans, prompt_length)
    if image_token is not None and sample.multimodal_train_inputs:
        _check_no_image(sample, spans, prompt_length, image_token)
    derived = provenance.loss_mask(spans, prompt_length)
    mask = derived if sample.loss_mask is None else _as_list(sample.loss_mask)
    if mask == derived:
        return spans, derived
    if odd := [m for m in mask if m not in (0, 1)]:
        raise ValueError(f"loss_mask has the entry {odd[0]!r}; each is 0 or 1")
    spans = _masked(spans, prompt_length, [bool(m) for m in mask], derived)
    return spans, provenance.loss_mask(spans, prompt_length)


def _check_columns(sample: Sample, spans: Spans, prompt_length: int) -> None:
    log_probs = None if sample.rollout_log_probs is None else _as_list(sample.rollout_log_probs)
    versions = _as_list(sample.token_weight_versions or [])
    newest = end = 0
    for span in spans:
        begin, end = max(0, end - prompt_length), end + span.length
        piece = slice(begin, end - prompt_length)
        if end <= prompt_length:
            continue
        sampled = span.source == Source.SAMPLED
        if log_probs is not None:
            _check_log_probs(log_probs[piece], sampled, span.source, begin)
        if not versions:
            continue
        if sampled:
            newest = _newest_version(versions[piece], newest, begin)
        elif versions[piece].count(NOT_SAMPLED) != end - prompt_length - begin:
            raise ValueError(
                f"response tokens {begin} to {end - prompt_length - 1} are {span.source.value}, and"
                " token_weight_versions says that a policy sampled some"
            )


def _check_no_image(sample: Sample, spans: Spans, prompt_length: int, image_token: int) -> None:
    end = 0
    for span in spans:
        begin, end = end, end + span.length
        if span.source == Source.SAMPLED and image_token in sample.tokens[begin:end]:
            at = sample.tokens.index(image_token, begin) - prompt_length
            raise ValueError(
                f"response token {at} was sampled and is {image_token}, the token of images: the model would look for"
                " an image there, beside those of the prompt"
            )


def _as_list(values: Any) -> list[Any]:
    return values if isinstance(values, list) else list(values)


def _check_log_probs(log_probs: Sequence[float], sampled: bool, source: Source, begin: int) -> None:
    if not sampled:
        if any(log_probs):
            at = next(i for i, p in enumerate(log_probs) if p)
            raise ValueError(
                f"response token {begin + at} is {source.value} and has log-prob {log_probs[at]}; only sampled tokens"
                " have one, others 0.0"
            )
    elif not math.isfinite(sum(log_probs)) or max(log_probs) > POSITIVE_LOG_PROB:
        at = next((i for i, p in enumerate(log_probs) if not -math.inf < p <= POSITIVE_LOG_PROB), 0)
        raise ValueError(
            f"response token {begin + at} was sampled with log-prob {log_probs[at]}; it must be a finite number <= 0"
        )


def _newest_version(versions: Sequence[int], newest: int, begin: int) -> int:
    """Return the newest version so far, including `versions`. Raises ValueError for a missing or decreasing version."""
    if versions[0] >= newest and versions.count(versions[0]) == len(versions):  # most responses
        return versions[0]
    for at, (before, version) in enumerate(pairwise([newest, *versions])):
        if version < 0:
            raise ValueError(f"response token {begin + at} was sampled and token_weight_versions has {version} for it")
        if version < before:
            raise ValueError(
                f"response token {begin + at} was sampled by weight version {version}, after one of version {before};"
                " versions never decrease along a sample"
            )
    return versions[-1]


def _masked(spans: Spans, prompt_length: int, mask: Sequence[bool], derived: Sequence[int]) -> Spans:
    """Return the spans with the mask's withheld tokens. Raises ValueError if it trains an untrainable token."""
    start = 0
    for span in spans:
        begin, start = max(0, start - prompt_length), start + span.length
        if span.source not in TRAINABLE and any(mask[begin : max(0, start - prompt_length)]):
            at = mask.index(True, begin)
            raise ValueError(
                f"loss_mask trains response token {at}, which is {span.source.value}; only tokens that the policy"
                " sampled, or that the data gives as the assistant's, can be trained on"
            )
    begin = 0
    for left_out, run in groupby(t and not m for m, t in zip(mask, derived, strict=True)):
        end = begin + sum(1 for _ in run)
        if left_out:
            spans = provenance.withhold(spans, prompt_length + begin, prompt_length + end, _BY_MASK)
        begin = end
    return spans
