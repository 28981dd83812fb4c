"""The source of each token of a sample: run-length encoded spans; the loss mask and the turns derived from them.

`sample.py` updates `Sample.spans` with these functions, and `admission.py` checks the spans. Standard library only.
Spans cover *all* of `Sample.tokens`, prompt and response; a loss mask covers the response. No code sets a mask to 1
directly: a token is trained if the policy sampled it, or if the data gave it as a demonstration, and if it is not
withheld.

::

    tokens  P0 P1 P2 P3 | S0 S1 S2 | T0 T1 | O0 O1 | T2 | S3 S4
    spans   USER 4        SAMPLED 3  TEMPL. 2 TOOL 2 TEMPLATE 1 SAMPLED 2
    mask                  1  1  1    0  0    0  0    0   1  1
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum
from itertools import chain, groupby, islice
from typing import Any, NamedTuple

NOT_SAMPLED = -1
"""`token_weight_versions` of a response token that no policy sampled (tool output, template)."""
POSITIVE_LOG_PROB = 1e-4
"""Log-probs up to here are rounding, not errors."""


class Source(StrEnum):
    """The source of a token."""

    SYSTEM = "system"
    """Text of a system (or developer) message."""
    USER = "user"
    """Text of a user's message; a text prompt as a whole."""
    TEMPLATE = "template"
    """Text that the chat template adds around messages, including the generation prompt; also tokens that replace
    sampled tokens."""
    TOOL = "tool"
    """Output of a tool or an environment."""
    SAMPLED = "sampled"
    """Tokens sampled by the policy, with a log-prob and a weight version."""
    DEMONSTRATION = "demonstration"
    """An assistant's text from the data: trained on in supervised fine-tuning, context elsewhere."""
    TEXT = "text"
    """A response that a generate function returned as text; it is tokenised again, so log-probs are unknown."""


_ROLE_SOURCES = {
    "system": Source.SYSTEM,
    "developer": Source.SYSTEM,
    "user": Source.USER,
    "assistant": Source.DEMONSTRATION,
    "tool": Source.TOOL,
    "function": Source.TOOL,
    "observation": Source.TOOL,
    "ipython": Source.TOOL,
}


def source_of(role: str) -> Source:
    """Return the source of a message's text; USER for unknown roles."""
    return _ROLE_SOURCES.get(role, Source.USER)


TRAINABLE = frozenset({Source.SAMPLED, Source.DEMONSTRATION, Source.TEXT})
"""Sources whose tokens may have a loss mask of 1."""


class Span(NamedTuple):
    """Consecutive tokens with the same source and the same `withheld` reason."""

    source: Source
    length: int
    """Number of tokens, > 0."""
    withheld: str = ""
    """Reason for which trainable tokens are masked ("mask_offpolicy_in_partial_rollout", "role reader", ...)."""

    @property
    def trained(self) -> bool:
        """Whether the loss mask of these tokens is 1 in a response."""
        return self.source in TRAINABLE and not self.withheld


Spans = list[Span]


class TurnSpan(NamedTuple):
    """A turn: the response tokens [first, last) that one author wrote without a break, and facts about them."""

    first: int
    """Place in the response of the turn's first token."""
    last: int
    """Place behind its last token; equal to `first` for a turn without tokens."""
    reward: float | None = None
    """Reward of this turn alone; None if it has none."""
    role: str = ""
    """Author, if the sample has several ("solver", "critic", ...)."""
    id: str = ""
    """Name that the environment, tool or agent gave the turn."""
    state: str | None = None
    """Id of the state in which the turn began, equal for equal states of a group's samples."""


def check_turns(turns: Iterable[TurnSpan], length: int, name: str) -> None:
    """Raise ValueError, beginning with `name`, unless the turns follow each other within `length` tokens."""
    end = 0
    for turn in turns:
        if not isinstance(turn, TurnSpan) or not end <= turn.first <= turn.last <= length:
            raise ValueError(f"{name}: turns has {turn!r:.120}; expected TurnSpans in order within {length} tokens")
        end = turn.last


def digest(tokens: Iterable[int]) -> int:
    """Return a hash of the token sequence, the same in every process."""
    return hash(tuple(tokens))


def num_tokens(spans: Iterable[Span]) -> int:
    """Return the number of tokens that the spans cover."""
    return sum([span.length for span in spans])


def add_span(spans: Spans, source: Source, length: int, withheld: str = "") -> None:
    """Append in place, extending the last span if source and reason match. Length 0 does nothing."""
    if length <= 0:
        return
    if spans and spans[-1].source == source and spans[-1].withheld == withheld:
        spans[-1] = Span(spans[-1].source, spans[-1].length + length, withheld)
    else:
        spans.append(Span(Source(source), length, withheld))


def joined(spans: Iterable[Span]) -> Spans:
    """Return the same tokens in as few spans as possible."""
    result: Spans = []
    for span in spans:
        add_span(result, *span)
    return result


def part(spans: Iterable[Span], first: int, last: int) -> Spans:
    """Return the spans of tokens [first, last)."""
    result: Spans = []
    start = 0
    for source, length, withheld in spans:
        begin, end = max(first, start), min(last, start + length)
        add_span(result, source, end - begin, withheld)
        start += length
    return result


def withhold(spans: Spans, first: int, last: int, reason: str) -> Spans:
    """Return `spans` with the trainable tokens of [first, last) withheld; tokens already withheld keep their reason.

    Raises:
        ValueError: `reason` is empty.
    """
    if not reason:
        raise ValueError("withholding tokens needs a reason")
    inner = (
        Span(span.source, span.length, reason if span.trained else span.withheld) for span in part(spans, first, last)
    )
    return joined([*part(spans, 0, first), *inner, *part(spans, last, num_tokens(spans))])


def loss_mask(spans: Iterable[Span], prompt_length: int = 0) -> list[int]:
    """Return the mask, [tokens - prompt_length], 1 for trained tokens."""
    whole = chain.from_iterable([int(span.trained)] * span.length for span in spans)
    return list(islice(whole, prompt_length, None))


def to_json(spans: Iterable[Span]) -> list[list[object]]:
    """Return [[source, length], ...], with the reason as a third entry if tokens are withheld."""
    rows = from_json(spans)
    return [[str(source), length, why] if why else [str(source), length] for source, length, why in rows]


def from_json(rows: Iterable[Sequence[Any]]) -> Spans:
    """Return spans from the output of `to_json`; accepts spans as well.

    Raises:
        ValueError: An entry is not [source, length] or [source, length, reason].
    """
    spans: Spans = []
    for row in rows:
        if type(row) is Span and type(row[0]) is Source and type(row[1]) is int and row[1] > 0:
            spans.append(row)
            continue
        try:
            source, length, withheld = (*row, "")[:3]
            spans.append(Span(Source(source), _length(length), str(withheld)))
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"span {row!r}: {error}; expected [source, length] or [source, length, reason]"
                f" with a source of {', '.join(Source)}"
            ) from error
    return spans


def _length(value: Any) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__") or value <= 0:
        raise ValueError(f"length {value!r} is no positive number")
    return int(value)


def response_spans(
    length: int,
    mask: Sequence[int] | None,
    versions: Sequence[int],
    log_probs: Sequence[float] | None,
) -> Spans:
    """Derive the spans of a response that was built without spans, from the known columns.

    A token counts as sampled if its weight version is not `NOT_SAMPLED`; without versions, if its mask is 1 or its
    log-prob is not 0. Other tokens are TOOL. A mask of 0 withholds a sampled token (reason "loss_mask").

    Args:
        length: Number of response tokens.
        mask: [length] or None, which withholds nothing.
        versions: [length] `NOT_SAMPLED` for tokens that were not sampled; empty if unknown.
        log_probs: [length] or None.
    """
    if not length:
        return []
    if len(versions) == length:
        sampled: Sequence[object] = [v != NOT_SAMPLED for v in versions]
    elif mask is None:
        return [Span(Source.SAMPLED, length)]
    else:
        sampled = mask if log_probs is None else [m or p != 0.0 for m, p in zip(mask, log_probs, strict=True)]
    fates = zip(map(bool, sampled), map(bool, mask if mask is not None else sampled), strict=True)
    spans: Spans = []
    for (was_sampled, trained), run in groupby(fates):
        count = sum(1 for _ in run)
        if was_sampled:
            add_span(spans, Source.SAMPLED, count, "" if trained else "loss_mask")
        else:
            add_span(spans, Source.TOOL, count)
    return spans


def version_number(version: Any) -> int:
    """Return an engine's weight version as a number; engines report strings, "default" before any update."""
    try:
        return int(version)
    except (TypeError, ValueError):
        return 0


def writer_of(source: str | None, trainable: bool) -> Source:
    """Return the source of appended tokens. Raises ValueError if it contradicts `trainable`."""
    if source is None:
        return Source.SAMPLED if trainable else Source.TOOL
    writer = Source(source)
    if (writer == Source.SAMPLED) != trainable:
        raise ValueError(f"source {writer.value!r} with trainable={trainable}; exactly sampled tokens are trainable")
    return writer
