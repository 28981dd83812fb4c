"""Turn the engine's tokens into a client's response: reasoning, content and calls, whole or streamed.

A desk makes an `Answer` of each finished request, and feeds a `LiveText` while a streamed request runs. Text that may
become a tool call is held back until this is decided, so the sent content is always the beginning of the final content.
If the parser's final result differs, the sent content is recorded.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

from slime_core.sample import GenerationOutput
from slime_core.text import held_back
from slime_core.tools import ParsedTurn, ToolCall, ToolParser, split_reasoning
from slime_serving.front.wanted import Message

_INCOMPLETE = "\ufffd"
_OPENINGS = "<[{"
"""First characters of tool calls in the formats of all parsers."""
_LONGEST_MARKER = 96
"""Number of characters after which an opening is no longer held back, unless the content begins with it."""


def finish_of(output: GenerationOutput) -> str:
    """Return "stop", "length" or "abort"."""
    reason = output.meta_info.get("finish_reason")
    return str(reason.get("type") if isinstance(reason, dict) else reason)


@runtime_checkable
class _Holding(Protocol):
    """A parser that finds the place from which content may become a call."""

    def held_from(self, content: str, tools: Sequence[Any]) -> int:
        """Return the index in `content` from which text must be held back."""


class Piece(NamedTuple):
    """New text of a growing answer."""

    reasoning: str = ""
    content: str = ""
    log_probs: list[dict[str, Any]] = []
    """OpenAI's log-prob objects of the tokens since the last piece, if requested."""


@dataclass
class Answer:
    """A finished answer."""

    output: GenerationOutput
    content: str
    reasoning: str
    calls: list[dict[str, Any]]
    """Tool calls in the format of an assistant's message, each with a unique id."""
    ill_formed: int
    prompt_tokens: int
    stop_match: str | None = None
    """Stop string of the request that ended the answer."""
    log_probs: list[dict[str, Any]] = field(default_factory=list)
    """OpenAI's log-prob objects, if requested."""
    known_log_probs: int = 0
    """Number of log-prob objects already sent with pieces."""
    first_of_prompt: bool = True
    """False if the answer is a further choice for the same prompt."""

    @property
    def finish(self) -> str:
        """Finish reason: "stop", "length", "abort" or "tool_calls"."""
        return "tool_calls" if self.calls and finish_of(self.output) == "stop" else finish_of(self.output)

    @property
    def completion_tokens(self) -> int:
        """Number of sampled tokens."""
        return len(self.output.token_ids)

    @property
    def cached_tokens(self) -> int:
        """Number of prompt tokens in the engine's cache."""
        return int(self.output.meta_info.get("cached_tokens") or 0)

    @property
    def message(self) -> Message:
        """Return the assistant's message."""
        message: Message = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = self.calls
        return message


class TurnReader:
    """A reader of the turns of one model family."""

    def __init__(self, tokenizer: Any, parser: ToolParser | None) -> None:
        """Create the reader; with `parser` None calls are not parsed and tools are refused."""
        self.tokenizer = tokenizer
        self.parser = parser
        self._spellings: dict[int, tuple[str, list[int]]] = {}
        """Token id -> text and bytes of the token."""

    def text(self, output: GenerationOutput, skipped_specials: bool, stops: Sequence[str]) -> tuple[str, str | None]:
        """Return the turn's text with special tokens but without its ending, and the stop string that ended it."""
        ids = output.token_ids
        text = self.tokenizer.decode(ids, skip_special_tokens=False) if skipped_specials else output.text
        reason = output.meta_info.get("finish_reason")
        matched = reason.get("matched") if isinstance(reason, dict) else None
        if ids and (ids[-1] == matched or ids[-1] == getattr(self.tokenizer, "eos_token_id", None)):
            text = text.removesuffix(self.tokenizer.decode(ids[-1:], skip_special_tokens=False))
        found = min((at, stop) for stop in [*stops, ""] if (at := text.find(stop) if stop else len(text)) >= 0)
        return text[: found[0]], found[1] or None

    def parse(self, text: str, tools: Sequence[dict[str, Any]], opened: bool) -> ParsedTurn:
        """Parse reasoning, content, and, with tools, calls."""
        if self.parser is not None and tools:
            return self.parser.parse(text, tools, reasoning_open=opened)
        reasoning, rest, still_open = split_reasoning(text, opened=opened)
        return ParsedTurn(rest.strip() if reasoning or still_open else rest, reasoning, reasoning_open=still_open)

    def opened(self, prompt_ids: Sequence[int]) -> bool:
        """Return True if the prompt ends inside the reasoning."""
        return str(self.tokenizer.decode(list(prompt_ids[-8:]), skip_special_tokens=False)).rstrip().endswith("<think>")

    def log_probs(self, output: GenerationOutput, since: int = 0) -> list[dict[str, Any]]:
        """Return OpenAI's object per token from `since` on, with the most likely tokens if the engine reported them."""
        tops = output.meta_info.get("output_top_logprobs") or [[]] * len(output.token_ids)
        rows = zip(output.token_ids[since:], output.log_probs[since:], tops[since:])
        return [
            self._log_prob(token, value) | {"top_logprobs": [self._log_prob(other, p) for p, other in top]}
            for token, value, top in rows
        ]

    def _log_prob(self, token: int, value: float) -> dict[str, Any]:
        if token not in self._spellings:
            text = self.tokenizer.decode([token], skip_special_tokens=False)
            self._spellings[token] = text, list(token_bytes(self.tokenizer, token, text))
        text, spelled = self._spellings[token]
        return {"token": text, "logprob": value, "bytes": spelled}


def token_bytes(tokenizer: Any, token: int, text: str) -> bytes:
    """Return the bytes of a token with text `text`, which is U+FFFD for a part of a character.

    Byte-level vocabularies spell each byte as a character (GPT-2), others have tokens like `<0xE2>` (SentencePiece).
    """
    if _INCOMPLETE not in text:
        return text.encode()
    piece = tokenizer.convert_ids_to_tokens(token)
    if fallback := re.fullmatch(r"<0x([0-9A-F]{2})>", piece):
        return bytes.fromhex(fallback[1])
    known = [_BYTES.get(character) for character in piece]
    return text.encode() if None in known else bytes(byte for byte in known if byte is not None)


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's character -> byte: printable bytes as themselves, others from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_BYTES = _byte_alphabet()


def calls_of(parsed: ParsedTurn) -> list[dict[str, Any]]:
    """Return the parsed calls in the format of an assistant's message."""
    return [_call(call) for call in parsed.calls]


def _call(call: ToolCall) -> dict[str, Any]:
    arguments = call.arguments if isinstance(call.arguments, dict) else {"raw": call.arguments}
    ident = call.id or f"call_{secrets.token_hex(12)}"
    return {"id": ident, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def arguments_json(call: dict[str, Any]) -> str:
    """Return the arguments of a call as the APIs send them."""
    return json.dumps(call["function"]["arguments"], ensure_ascii=False)


@dataclass
class LiveText:
    """The parts of a growing answer that have been sent."""

    reader: TurnReader
    tools: list[dict[str, Any]]
    opened: bool
    stops: list[str]
    reasoning: str = ""
    content: str = ""

    def grow(self, text: str) -> tuple[str, str]:
        """Return the new pieces of (reasoning, content), given the whole text so far."""
        text = self._before_stops(text).rstrip(_INCOMPLETE)
        parsed = self.reader.parse(text, self.tools, self.opened)
        if parsed.attempts:
            return "", ""
        if parsed.reasoning_open:
            return self._grown("reasoning", _before_openings(parsed.reasoning, len(self.reasoning), "<")), ""
        reasoning = self._grown("reasoning", parsed.reasoning)
        openings = _OPENINGS if self.tools else "<" if not parsed.reasoning and not self.content else ""
        content = parsed.content[: self._held_from(parsed.content)]
        return reasoning, self._grown("content", _before_openings(content, len(self.content), openings).rstrip())

    def _held_from(self, content: str) -> int:
        """Return the index from which the content may become a call, according to the parser."""
        parser = self.reader.parser
        return parser.held_from(content, self.tools) if self.tools and isinstance(parser, _Holding) else len(content)

    def raw(self, text: str) -> str:
        """Return the new text of an answer that is content only, given the whole text so far."""
        return self._grown("content", text)

    def finish(self, content: str, reasoning: str) -> tuple[str, str]:
        """Return the last pieces of (reasoning, content), given the final texts."""
        return self._grown("reasoning", reasoning), self._grown("content", content)

    def _grown(self, name: str, whole: str) -> str:
        shown = getattr(self, name)
        if not whole.startswith(shown):
            return ""
        setattr(self, name, whole)
        return whole[len(shown) :]

    def _before_stops(self, text: str) -> str:
        """Return the text up to a stop string or a possible beginning of a stop string."""
        for stop in self.stops:
            at = text.find(stop)
            if at >= 0:
                text = text[:at]
        return text[: len(text) - held_back(text, self.stops)]


def _before_openings(text: str, shown: int, openings: str) -> str:
    """Return the text up to the place where a call may begin."""
    for at in range(shown, len(text)):
        if text[at] in openings and (at == 0 or len(text) - at <= _LONGEST_MARKER):
            return text[:at]
    return text
