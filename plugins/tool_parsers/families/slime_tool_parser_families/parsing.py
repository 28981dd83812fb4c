"""What the parsers of all families have in common: a turn -> reasoning, content and the calls between markers.

A family derives from `MarkedParser` (calls stand between two markers, as most families write them) or from
`ToolParserBase`, and says how one call is read and written. A marker without its end is a call cut short, and is
reported as ill-formed, not taken as content.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

from slime_core.tools import IllFormedCall, ParsedTurn, ToolCall, ToolSchema, split_reasoning

Attempt: TypeAlias = ToolCall | IllFormedCall


class ToolParserBase:
    """A parser but for `read`, `render` and `claims`."""

    ends: ClassVar[tuple[str, ...]] = ()
    """Tokens that end a turn of the family, taken off before anything is read."""
    reasoning_tags: ClassVar[tuple[str, str]] = ("<think>", "</think>")

    def parse(self, text: str, tools: Sequence[ToolSchema] = (), *, reasoning_open: bool = False) -> ParsedTurn:
        """See `ToolParser.parse`."""
        text = self.without_ends(text)
        reasoning, rest, still_open = split_reasoning(text, opened=reasoning_open, tags=self.reasoning_tags)
        if still_open:
            return ParsedTurn(reasoning=reasoning, reasoning_open=True)
        content, attempts = self.read(rest, tools)
        return ParsedTurn(content.strip(), reasoning, tuple(attempts))

    def without_ends(self, text: str) -> str:
        """The text without the tokens that end the turn, and the blank space before them."""
        while True:
            stripped = text.rstrip()
            end = next((end for end in self.ends if stripped.endswith(end)), None)
            if end is None:
                return text
            text = stripped[: -len(end)]

    def read(self, text: str, tools: Sequence[ToolSchema]) -> tuple[str, list[Attempt]]:
        """(content, calls) of a turn without its reasoning."""
        raise NotImplementedError

    def render(self, calls: Sequence[ToolCall]) -> str:
        """See `ToolParser.render`."""
        raise NotImplementedError

    def claims(self, chat_template: str) -> bool:
        """See `ToolParser.claims`."""
        raise NotImplementedError


class MarkedParser(ToolParserBase):
    """Calls between `begin` and `end`; what is around them is content."""

    begin: ClassVar[str]
    end: ClassVar[str]
    dropped: ClassVar[tuple[str, ...]] = ()
    """Markers around all calls of a turn, no part of the content."""

    def read(self, text: str, tools: Sequence[ToolSchema]) -> tuple[str, list[Attempt]]:
        """Everything between the markers is one call, or what `calls_in` makes of it."""
        content: list[str] = []
        attempts: list[Attempt] = []
        while True:
            before, found, rest = text.partition(self.begin)
            content.append(before)
            if not found:
                break
            body, closed, text = rest.partition(self.end)
            if closed:
                attempts += self.calls_in(body, tools)
            else:
                attempts.append(IllFormedCall(body, f"the call has no {self.end}"))
                break
        kept = "".join(content)
        for marker in self.dropped:
            kept = kept.replace(marker, "")
        return kept, attempts

    def calls_in(self, body: str, tools: Sequence[ToolSchema]) -> list[Attempt]:
        """The calls in what stands between the markers, mostly one."""
        raise NotImplementedError


def read_json(text: str) -> Any:
    """A JSON value. Raises ValueError for everything else: also for NaN, and for nesting that is too deep to read."""
    try:
        return json.loads(text, parse_constant=_refused)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _refused(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_refused)


def json_call(body: str, arguments_key: str = "arguments", *, other_key: str = "parameters") -> Attempt:
    """A call written as `{"name": ..., "arguments": {...}}`; the arguments may be JSON inside a string."""
    try:
        value = read_json(body)
    except ValueError as error:
        return IllFormedCall(body, f"not JSON: {error}")
    return call_of(value, body, arguments_key, other_key)


def call_of(value: Any, body: str, arguments_key: str = "arguments", other_key: str = "parameters") -> Attempt:
    """The call that a JSON value is, or why it is none."""
    if not isinstance(value, Mapping):
        return IllFormedCall(body, "a call is a JSON object with a name and arguments")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return IllFormedCall(body, 'the call has no "name"')
    arguments = value.get(arguments_key, value.get(other_key, {}))
    return named_call(name, {} if arguments is None else arguments, body)


def named_call(name: str, arguments: Any, body: str, id: str = "") -> Attempt:
    """A call of a name that was read; `arguments` are an object, or its JSON."""
    if isinstance(arguments, str):
        try:
            arguments = read_json(arguments) if arguments.strip() else {}
        except ValueError as error:
            return IllFormedCall(body, f"the arguments are not JSON: {error}", name, id)
    if not isinstance(arguments, dict):
        return IllFormedCall(body, "the arguments are no JSON object", name, id)
    return ToolCall(id, name, arguments)


def json_objects(text: str, separators: str = ";, \t\r\n") -> Iterator[tuple[Any, str]]:
    """JSON values that follow one another, each with its text.

    Raises:
        ValueError: What follows is no JSON; `args[1]` is the rest of the text.
    """
    place = 0
    while True:
        while place < len(text) and text[place] in separators:
            place += 1
        if place >= len(text):
            return
        try:
            value, end = _DECODER.raw_decode(text, place)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"not JSON: {error}", text[place:]) from error
        yield value, text[place:end]
        place = end
