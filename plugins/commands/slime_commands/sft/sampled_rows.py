"""Samples that a policy generated -> rows for `slime sft`, and back: token ids, not text.

`slime samples filter` writes with `to_row`; the supervised rollout reads with `SampledRow`. A row's label is the
reference answer of the task and is never trained on. The trained tokens are in `metadata["slime_sampled"]`, with a hash
of their vocabulary.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slime_commands.sft.demonstrations import Piece
from slime_core.errors import DataError
from slime_core.sample import Sample, provenance
from slime_core.sample.admission import settled
from slime_core.sample.provenance import Source, Span, Spans

KEY = "slime_sampled"
"""Key in a row's metadata."""


@functools.lru_cache(maxsize=4)
def vocabulary(tokenizer: Any) -> str:
    """Return the SHA-256 of the vocabulary's (id, token) pairs: equal if ids mean the same text."""
    digest = hashlib.sha256()
    for token, number in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]):
        digest.update(f"{number}\t{token}\n".encode())
    return digest.hexdigest()


def to_row(sample: Sample, tokenizer: Any) -> dict[str, Any]:
    """Return a row of `--prompt-data`: `input`, `label`, `metadata` with the tokens, and `tools` if the sample has any.

    Args:
        sample: A sample for which `admission.problem` reports no problem.
        tokenizer: Tokenizer of the model that sampled.
    """
    spans, _ = settled(sample)
    response = provenance.part(spans, len(sample.tokens) - sample.response_length, len(sample.tokens))
    plain = isinstance(sample.prompt, str)
    special = (*tokenizer.all_special_tokens, *tokenizer.get_added_vocab())
    sampled = {
        "tokens": sample.tokens,
        "spans": provenance.to_json(spans),
        "response_length": sample.response_length,
        "vocabulary": vocabulary(tokenizer),
        "response": tokenizer.decode(sample.response_tokens, skip_special_tokens=True),
        "one_turn": {s.source for s in response} == {Source.SAMPLED},
        "rendered": plain and any(token in sample.prompt for token in special if token),
        "reward": sample.reward,
        "rollout": {"group_index": sample.group_index, "index": sample.index},
    }
    own = {k: v for k, v in sample.metadata.items() if k not in ("source_name", "source_index", "tools", KEY)}
    row = {"input": sample.prompt, "label": sample.label, "metadata": {**own, KEY: sampled}}
    tools = sample.metadata.get("tools")
    return {**row, "tools": tools} if tools else row


@dataclass(frozen=True)
class SampledRow:
    """The entry that `to_row` writes to a row's metadata."""

    tokens: list[int]
    """[prompt + response]."""
    spans: Spans
    response_length: int
    vocabulary: str
    """Hash from `vocabulary`."""
    response: str
    """Text without special tokens, all turns and tool results concatenated."""
    one_turn: bool
    """Whether the response consists of sampled tokens only."""
    rendered: bool
    """Whether a chat template wrote the prompt's text."""

    @classmethod
    def of(cls, sample: Sample) -> SampledRow | None:
        """Read the row's entry; None if it has none. Raises DataError if the entry is not in the form of `to_row`."""
        found = sample.metadata.get(KEY)
        if found is None:
            return None
        try:
            row = cls(
                [int(token) for token in found["tokens"]],
                provenance.from_json(found["spans"]),
                int(found["response_length"]),
                str(found["vocabulary"]),
                str(found["response"]),
                bool(found["one_turn"]),
                bool(found["rendered"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"metadata.{KEY} is not what slime samples filter writes: {error!r}") from error
        if provenance.num_tokens(row.spans) != len(row.tokens) or not 0 < row.response_length < len(row.tokens):
            raise DataError(f"metadata.{KEY}: spans, response_length and its {len(row.tokens)} tokens do not fit")
        return row

    def fits(self, tokenizer: Any) -> bool:
        """Return whether the ids mean the same text with this tokenizer as when they were sampled."""
        return self.vocabulary == vocabulary(tokenizer)

    def pieces(self) -> list[Piece]:
        """Return the tokens as they were sampled; sampled tokens become the demonstration."""
        prompt_length = len(self.tokens) - self.response_length
        start, found = 0, []
        for span in self._as_data(prompt_length):
            found.append(Piece(self.tokens[start : start + span.length], span.source, span.withheld))
            start += span.length
        return found

    def _as_data(self, prompt_length: int) -> Spans:
        prompt = provenance.part(self.spans, 0, prompt_length)
        response = provenance.part(self.spans, prompt_length, len(self.tokens))
        kept = [s._replace(withheld=s.withheld or "context") if s.trained else s for s in prompt]
        return [_demonstrated(span) for span in (*kept, *response)]

    def text(self) -> str:
        """Return the answer's text for another tokenizer. Raises DataError if the text would be a different answer."""
        if not self.one_turn:
            raise DataError(
                "sampled with another vocabulary, in several turns or with tools; only the tokenizer it was sampled"
                " with can train on it"
            )
        if self.rendered:
            raise DataError(
                "sampled with another vocabulary, after a prompt that its chat template wrote; generate from chat"
                " messages without --apply-chat-template, so that this model's template can write them"
            )
        return self.response


def _demonstrated(span: Span) -> Span:
    return span._replace(source=Source.DEMONSTRATION) if span.source == Source.SAMPLED else span


def reward_of(sample: Sample, key: str | None) -> float | None:
    """Return the sample's reward as a number, or None if it has no reward. Raises DataError."""
    value = sample.reward
    if isinstance(value, Mapping):
        if key is None or key not in value:
            raise DataError(
                f"sample {sample.index}: the reward is a mapping of {', '.join(value)}; name one: --reward-key"
            )
        value = value[key]
    return None if value is None else float(value)
