"""Parts that the parsers share: reasoning and end tokens, calls between markers, JSON calls.

A family derives from `MarkedParser` (calls between two markers, as in most families) or from `ToolParserBase`, and
defines how a call is parsed and written. A begin marker without its end is a truncated call; it is reported as
ill-formed, not treated as content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

from slime_core.tools import IllFormedCall, ParsedTurn, ToolCall, ToolSchema, split_reasoning
from slime_tool_parsers.values import DECODER, json_end, read_json

Attempt: TypeAlias = ToolCall | IllFormedCall


class ToolParserBase:
    """Base class of parsers; subclasses implement `read`, `render` and `claims`."""

    ends: ClassVar[tuple[str, ...]] = ()
    """Tokens that end a turn of the family, removed before parsing."""
    reasoning_tags: ClassVar[tuple[str, str]] = ("<think>", "</think>")

    def parse(self, text: str, tools: Sequence[ToolSchema] = (), *, reasoning_open: bool = False) -> ParsedTurn:
        """See `ToolParser.parse`."""
        text = self.without_ends(text)
        reasoning, rest, still_open = split_reasoning(
            text,
            opened=reasoning_open,
            tags=self.tags_of(text),
            call_begun=lambda before: self.call_begun(before, tools),
        )
        if still_open:
            return ParsedTurn(reasoning=reasoning, reasoning_open=True)
        content, attempts = self.read(rest, tools)
        return ParsedTurn(content.strip(), reasoning, tuple(map(_encodable, attempts)))

    def without_ends(self, text: str) -> str:
        """Return the text without the tokens that end the turn, and without the blank space before them."""
        while True:
            stripped = text.rstrip()
            end = next((end for end in self.ends if stripped.endswith(end)), None)
            if end is None:
                return text
            text = stripped[: -len(end)]

    def tags_of(self, text: str) -> tuple[str, str]:
        """Return the reasoning tags of this turn, for a family that has more than one pair."""
        return self.reasoning_tags

    def call_begun(self, text: str, tools: Sequence[ToolSchema]) -> bool:
        """Return True for a call that can be parsed, and if the text ends inside an argument.

        Later reasoning tags then close nothing. A marker alone is not a call, since reasoning may mention it.
        """
        attempts = self.read(text, tools)[1]
        return any(isinstance(attempt, ToolCall) or self.cut_in_argument(attempt.text) for attempt in attempts)

    def cut_in_argument(self, body: str) -> bool:
        """Return True if the body of a call ends inside an argument: here, inside a string of its JSON."""
        return bool(_OPEN_STRING.fullmatch(body))

    def held_from(self, content: str, tools: Sequence[ToolSchema]) -> int:
        """Return the position from which the content of a growing turn may still become a call; a server holds it back.

        For calls that begin with `<`, `[` or `{`, the server itself holds text back for the length of a marker.
        """
        return len(content)

    def read(self, text: str, tools: Sequence[ToolSchema]) -> tuple[str, list[Attempt]]:
        """Return (content, calls) of a turn without its reasoning."""
        raise NotImplementedError

    def render(self, calls: Sequence[ToolCall]) -> str:
        """See `ToolParser.render`."""
        raise NotImplementedError

    def claims(self, chat_template: str) -> bool:
        """See `ToolParser.claims`."""
        raise NotImplementedError


def _encodable(attempt: Attempt) -> Attempt:
    """Return the call, or an `IllFormedCall` if an escape in it, such as `\\ud800`, is half of a character."""
    if isinstance(attempt, IllFormedCall):
        return attempt
    try:
        json.dumps([attempt.id, attempt.name, attempt.arguments], ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        problem = f"\\u{ord(error.object[error.start]):04x} is half of a character"
        return IllFormedCall(json.dumps({"name": attempt.name, "arguments": attempt.arguments}), problem)
    except RecursionError:
        return IllFormedCall(attempt.name, "nested too deeply")
    return attempt


class MarkedParser(ToolParserBase):
    """Calls between `begin` and `end`; the text around them is content.

    If the body of a call is JSON, the JSON determines its end: a marker inside a JSON string is text.
    """

    begin: ClassVar[str]
    end: ClassVar[str]
    dropped: ClassVar[tuple[str, ...]] = ()
    """Markers around all calls of a turn, which are not part of the content."""
    before_json: ClassVar[re.Pattern[str]] = re.compile(r"\s*")
    """Matches the text between `begin` and the call's JSON."""

    def read(self, text: str, tools: Sequence[ToolSchema]) -> tuple[str, list[Attempt]]:
        """Return (content, calls); text between the markers is parsed by `calls_in`."""
        content: list[str] = []
        attempts: list[Attempt] = []
        while True:
            before, found, rest = text.partition(self.begin)
            content.append(before)
            if not found:
                break
            stop = self._stop(rest)
            if stop is None:
                attempts.append(IllFormedCall(rest, f"the call has no {self.end}"))
                break
            found_calls, inner = self.calls_in(rest[:stop], tools), rest.find(self.begin, 0, stop)
            if inner >= 0 and not any(isinstance(attempt, ToolCall) for attempt in found_calls):
                attempts.append(IllFormedCall(rest[:inner], f"the call has no {self.end}"))
                text = rest[inner:]
                continue
            attempts += found_calls
            text = rest[stop:].removeprefix(self.end)
        kept = "".join(content)
        for marker in self.dropped:
            kept = kept.replace(marker, "")
        return kept, attempts

    def _stop(self, text: str) -> int | None:
        """Return the end of the body that begins the text: the first marker after its JSON; None without one."""
        opening = self.before_json.match(text)
        start = json_end(text, opening.end()) if opening else 0
        complete = opening is not None and start > opening.end()
        markers = (self.end, self.begin) if complete else (self.end,)
        return min((place for marker in markers if (place := text.find(marker, start)) >= 0), default=None)

    def calls_in(self, body: str, tools: Sequence[ToolSchema]) -> list[Attempt]:
        """Return the calls between two markers, usually one."""
        raise NotImplementedError


_OPEN_STRING = re.compile(r'[^{\[]*+[{\[](?:[^"]|"(?:[^"\\]|\\.)*+")*+"(?:[^"\\]|\\.)*+\\?', re.DOTALL)
"""Pattern of JSON, perhaps after a name, that ends inside a string."""


def json_call(body: str, arguments_key: str = "arguments", *, other_key: str = "parameters") -> Attempt:
    """Return a call written as `{"name": ..., "arguments": {...}}`; the arguments may be JSON inside a string."""
    try:
        value = read_json(body)
    except ValueError as error:
        return IllFormedCall(body, f"not JSON: {error}")
    return call_of(value, body, arguments_key, other_key)


def call_of(value: Any, body: str, arguments_key: str = "arguments", other_key: str = "parameters") -> Attempt:
    """Return the tool call in a JSON value, or an `IllFormedCall` with the problem."""
    if not isinstance(value, Mapping):
        return IllFormedCall(body, "a call is a JSON object with a name and arguments")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return IllFormedCall(body, 'the call has no "name"')
    arguments = value.get(arguments_key, value.get(other_key, {}))
    return named_call(name, {} if arguments is None else arguments, body)


def named_call(name: str, arguments: Any, body: str, id: str = "") -> Attempt:
    """Return a call with a known name; `arguments` are an object, or its JSON."""
    if isinstance(arguments, str):
        try:
            arguments = read_json(arguments) if arguments.strip() else {}
        except ValueError as error:
            return IllFormedCall(body, f"the arguments are not JSON: {error}", name, id)
    if not isinstance(arguments, dict):
        return IllFormedCall(body, "the arguments are no JSON object", name, id)
    return ToolCall(id, name, arguments)


def tool_names(tools: Sequence[ToolSchema]) -> set[str]:
    """Return the names of the tools."""
    return {str(tool["function"]["name"]) for tool in tools}


def json_objects(text: str, separators: str = ";, \t\r\n") -> Iterator[tuple[Any, str]]:
    """Yield JSON values that follow one another, each with its text.

    Raises:
        ValueError: The rest of the text is not JSON; it is in `args[1]`.
    """
    place = 0
    while True:
        while place < len(text) and text[place] in separators:
            place += 1
        if place >= len(text):
            return
        try:
            value, end = DECODER.raw_decode(text, place)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"not JSON: {error}", text[place:]) from error
        yield value, text[place:end]
        place = end
