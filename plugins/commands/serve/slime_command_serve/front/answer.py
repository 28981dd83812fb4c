"""The engine's tokens -> what a client is shown: reasoning, content and calls, whole or piece by piece.

A desk makes an `Answer` of each finished request, and feeds a `LiveText` while a streamed one grows. Text that may turn
out to be a tool call is held back until it is known, so the pieces of content are always the beginning of the final
content; where a parser decides otherwise in the end, the content that was shown is the content that is recorded.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from slime_command_serve.front.wanted import Message
from slime_core.text import held_back
from slime_core.tools import ParsedTurn, ToolCall, ToolParser, split_reasoning
from slime_core.types import GenerationOutput

_INCOMPLETE = "\ufffd"
_OPENINGS = "<[{"
"""Characters that tool calls begin with, in the formats of all parsers."""
_LONGEST_MARKER = 96
"""Characters after which an opening is no beginning of a call any more, unless the content begins with it."""


def finish_of(output: GenerationOutput) -> str:
    """ "stop", "length" or "abort"."""
    reason = output.meta_info.get("finish_reason")
    return str(reason.get("type") if isinstance(reason, dict) else reason)


class Piece(NamedTuple):
    """New text of a growing answer."""

    reasoning: str = ""
    content: str = ""
    log_probs: list[dict[str, Any]] = []
    """OpenAI's objects, of the tokens since the last piece; where they are wanted."""


@dataclass
class Answer:
    """One finished answer."""

    output: GenerationOutput
    content: str
    reasoning: str
    calls: list[dict[str, Any]]
    """As in an assistant's message, each with an id of its own."""
    ill_formed: int
    prompt_tokens: int
    stop_match: str | None = None
    """The stop string of the request that ended it."""
    log_probs: list[dict[str, Any]] = field(default_factory=list)
    """OpenAI's objects, where the request asked for them."""
    known_log_probs: int = 0
    """How many of them came with pieces."""
    first_of_prompt: bool = True
    """False: another choice for the same prompt."""

    @property
    def finish(self) -> str:
        """ "stop", "length" or "tool_calls"."""
        return "tool_calls" if self.calls and finish_of(self.output) == "stop" else finish_of(self.output)

    @property
    def completion_tokens(self) -> int:
        """Tokens sampled."""
        return len(self.output.token_ids)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the engine had computed before."""
        return int(self.output.meta_info.get("cached_tokens") or 0)

    @property
    def message(self) -> Message:
        """The assistant's message."""
        message: Message = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = self.calls
        return message


class TurnReader:
    """Reads the turns of one model family."""

    def __init__(self, tokenizer: Any, parser: ToolParser | None) -> None:
        """`parser`: None where the model's calls are not to be read; tools are then refused."""
        self.tokenizer = tokenizer
        self.parser = parser
        self._spellings: dict[int, tuple[str, list[int]]] = {}
        """Token -> its text, and its bytes."""

    def text(self, output: GenerationOutput, skipped_specials: bool, stops: Sequence[str]) -> tuple[str, str | None]:
        """(the turn's text with special tokens but without what ended it, the stop string that did)."""
        ids = output.token_ids
        text = self.tokenizer.decode(ids, skip_special_tokens=False) if skipped_specials else output.text
        reason = output.meta_info.get("finish_reason")
        matched = reason.get("matched") if isinstance(reason, dict) else None
        if ids and (ids[-1] == matched or ids[-1] == getattr(self.tokenizer, "eos_token_id", None)):
            text = text.removesuffix(self.tokenizer.decode(ids[-1:], skip_special_tokens=False))
        found = min((at, stop) for stop in [*stops, ""] if (at := text.find(stop) if stop else len(text)) >= 0)
        return text[: found[0]], found[1] or None

    def parse(self, text: str, tools: Sequence[dict[str, Any]], opened: bool) -> ParsedTurn:
        """Reasoning, content, and calls where tools were given."""
        if self.parser is not None and tools:
            return self.parser.parse(text, tools, reasoning_open=opened)
        reasoning, rest, still_open = split_reasoning(text, opened=opened)
        return ParsedTurn(rest.strip() if reasoning or still_open else rest, reasoning, reasoning_open=still_open)

    def opened(self, prompt_ids: Sequence[int]) -> bool:
        """Whether the prompt ends inside the reasoning."""
        return str(self.tokenizer.decode(list(prompt_ids[-8:]), skip_special_tokens=False)).rstrip().endswith("<think>")

    def log_probs(self, output: GenerationOutput, since: int = 0) -> list[dict[str, Any]]:
        """OpenAI's object per token from `since` on, with the likeliest others where the engine told them."""
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
    """The bytes of a token whose text is `text`, which for a part of a character is U+FFFD.

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
    """Character -> byte, as GPT-2 spells them: printable ones as themselves, the others from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_BYTES = _byte_alphabet()


def calls_of(parsed: ParsedTurn) -> list[dict[str, Any]]:
    """The calls that could be read, as an assistant's message has them."""
    return [_call(call) for call in parsed.calls]


def _call(call: ToolCall) -> dict[str, Any]:
    arguments = call.arguments if isinstance(call.arguments, dict) else {"raw": call.arguments}
    ident = call.id or f"call_{secrets.token_hex(12)}"
    return {"id": ident, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def arguments_json(call: dict[str, Any]) -> str:
    """The arguments of a call as the APIs send them."""
    return json.dumps(call["function"]["arguments"], ensure_ascii=False)


@dataclass
class LiveText:
    """What of a growing answer has been shown."""

    reader: TurnReader
    tools: list[dict[str, Any]]
    opened: bool
    stops: list[str]
    reasoning: str = ""
    content: str = ""

    def grow(self, text: str) -> tuple[str, str]:
        """New pieces of (reasoning, content), given the whole text so far."""
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
        """Return the place from which the parser says that content may become a call."""
        held_from = getattr(self.reader.parser, "held_from", None)
        return held_from(content, self.tools) if held_from and self.tools else len(content)

    def raw(self, text: str) -> str:
        """New text where none of it is anything but content, given the whole text so far."""
        return self._grown("content", text)

    def finish(self, content: str, reasoning: str) -> tuple[str, str]:
        """The last pieces, given the final ones."""
        return self._grown("reasoning", reasoning), self._grown("content", content)

    def _grown(self, name: str, whole: str) -> str:
        shown = getattr(self, name)
        if not whole.startswith(shown):
            return ""
        setattr(self, name, whole)
        return whole[len(shown) :]

    def _before_stops(self, text: str) -> str:
        """The text up to a stop string, or to what may be the beginning of one."""
        for stop in self.stops:
            at = text.find(stop)
            if at >= 0:
                text = text[:at]
        return text[: len(text) - held_back(text, self.stops)]


def _before_openings(text: str, shown: int, openings: str) -> str:
    """The text up to where a call may begin."""
    for at in range(shown, len(text)):
        if text[at] in openings and (at == 0 or len(text) - at <= _LONGEST_MARKER):
            return text[:at]
    return text
