"""Tool calls with values in tags, without quotes: Qwen3-Coder, MiniMax-M2 and GLM-4.5.

The text alone does not distinguish `5` from `"5"`; the tools' schemas do (`values.typed_value`). A value may contain
the characters of a closing tag: a tag closes a value only if the rest of a call follows it. A missing tag is accepted
if the next tag shows that the value or the function has ended. A value that is cut off by the end of the text is
ill-formed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, ClassVar

from slime_core.tools import IllFormedCall, ToolCall, ToolSchema
from slime_tool_parsers.parsing import Attempt, MarkedParser, tool_names
from slime_tool_parsers.schema import json_text, parameters_of
from slime_tool_parsers.values import json_end, typed_value

_BLANK = re.compile(r"\s*")


def value_text(value: Any) -> str:
    """Return a value as it stands in its tags."""
    return value if isinstance(value, str) else json_text(value)


def named_arguments(call: ToolCall) -> dict[str, Any]:
    """Return the arguments by name. Raise ValueError if they are text."""
    if isinstance(call.arguments, str):
        raise ValueError(f"call of {call.name}: arguments in tags have names; got text")
    return call.arguments


class TaggedValues(MarkedParser):
    """A parser of functions in tags, with parameters in tags; the outer markers may be missing."""

    function: ClassVar[re.Pattern[str]]
    """Opening tag of a function; `name`."""
    function_end: ClassVar[str]
    """Closing tag of a function; empty if `end` closes it."""
    parameter: ClassVar[re.Pattern[str]]
    """Opening tag of a parameter; `key`."""
    parameter_end: ClassVar[str]
    padded: ClassVar[bool] = False
    """True: one newline on each side of a value is not part of the value."""

    def read(self, text: str, tools: Sequence[ToolSchema]) -> tuple[str, list[Attempt]]:
        """Return the calls between the markers, and calls of known tools without markers."""
        content: list[str] = []
        attempts: list[Attempt] = []
        place = 0
        while (start := self._next_call(text, place, tool_names(tools))) is not None:
            content.append(text[place:start])
            found, place = self._calls(text, start, tools)
            attempts += found
        return "".join([*content, text[place:]]), attempts

    def _next_call(self, text: str, place: int, known: set[str]) -> int | None:
        """Return the place of the next marker, or of a function without one that is a tool's and has its next tag."""
        marker = text.find(self.begin, place)
        for opener in self.function.finditer(text, place) if self.function_end else ():
            if 0 <= marker < opener.start():
                break
            after = self._skipped(text, opener.end())
            follows = after == len(text) or text.startswith(self.function_end, after)
            if (follows or self.parameter.match(text, after)) and (opener["name"].strip() in known or not known):
                return opener.start()
        return marker if marker >= 0 else None

    def _calls(self, text: str, start: int, tools: Sequence[ToolSchema]) -> tuple[list[Attempt], int]:
        """Return the calls that begin at a marker or a function, and the place after them."""
        marked = text.startswith(self.begin, start)
        body = place = start + len(self.begin) if marked else start
        found: list[Attempt] = []
        while opener := self.function.match(text, self._skipped(text, place)):
            attempt, place = self._function(text, opener, tools)
            found.append(attempt)
        after = self._skipped(text, place)
        if not marked or (found and (after == len(text) or text.startswith(self.begin, after))):
            return found, place
        stop = text.find(self.end, after)
        if stop < 0:
            return [*found, IllFormedCall(text[body:], f"the call has no {self.end}")], len(text)
        if stop > after or not found:
            found.append(IllFormedCall(text[body:stop], "text between the markers that is no function call"))
        return found, stop + len(self.end)

    def _function(self, text: str, opener: re.Match[str], tools: Sequence[ToolSchema]) -> tuple[Attempt, int]:
        """Return one call, and the place after it."""
        name, place = opener["name"].strip(), opener.end()
        properties = (parameters_of(tools, name) or {}).get("properties") or {}
        values: dict[str, str] = {}
        while parameter := self.parameter.match(text, self._skipped(text, place)):
            key, start = parameter["key"].strip(), parameter.end()
            expected = properties.keys() - values.keys() - {key} if properties else None
            stop, place = self._value(text, start, expected)
            if stop is None:
                return IllFormedCall(text[opener.start() :], f"parameter {key} has no closing tag", name), len(text)
            values[key] = self._unpadded(text[start:stop])
        place, problem = self._function_end(text, place, bool(values))
        if problem or not name:
            return IllFormedCall(text[opener.start() : place], problem or "the call has no name", name), place
        return ToolCall(
            "", name, {key: typed_value(value, properties.get(key)) for key, value in values.items()}
        ), place

    def _function_end(self, text: str, place: int, has_values: bool) -> tuple[int, str]:
        """Return the place after the function whose parameters were read, and what is wrong with its end."""
        after = self._skipped(text, place)
        if self.function_end and text.startswith(self.function_end, after):
            return after + len(self.function_end), ""
        if after == len(text):
            complete = has_values and self.function_end
            return after, "" if complete else f"the call has no {self.function_end or self.end}"
        if text.startswith((self.begin, self.end), after) or self.function.match(text, after):
            return place, ""
        stop = min(self._places(text, after, len(text), self.function_end, self.end), default=len(text))
        closed = self.function_end and text.startswith(self.function_end, stop)
        return stop + len(self.function_end) if closed else stop, "text between the parameters"

    def _value(self, text: str, start: int, expected: set[str] | None) -> tuple[int | None, int]:
        """Return the end of the value that begins at `start` and the place after its closing tag.

        Args:
            text: The turn.
            start: Place after the opening tag.
            expected: Parameters of the tool that have no value yet, None if the tool has no schema: the opening tag of
                one of them (without a schema: one at the beginning of a line) ends a value without closing tag.
        """
        closing = self._skipped(text, json_end(text, self._skipped(text, start)))
        after = closing + len(self.parameter_end)
        if text.startswith(self.parameter_end, closing) and self._call_goes_on(text, after):
            return closing, after
        limit = self._next_function(text, start)
        following = limit
        for tag in self.parameter.finditer(text, start, limit):
            if tag["key"].strip() in expected if expected is not None else text[start : tag.start()].endswith("\n"):
                following = tag.start()
                break
        tags = [tag.start() for tag in re.compile(re.escape(self.parameter_end)).finditer(text, start, limit)]
        found = next((tag for tag in tags if self._call_goes_on(text, tag + len(self.parameter_end))), None)
        if found is None or found > following:
            found = next((tag for tag in tags if tag < following), None)
        if found is not None:
            return found, found + len(self.parameter_end)
        stop = min([following, *self._places(text, start, limit, self.function_end, self.end)])
        return (None, len(text)) if stop == len(text) else (stop, stop)

    def _next_function(self, text: str, start: int) -> int:
        """Return the place of the marker that begins the next call, after one that ended a call."""
        ended = text.find(self.end, start)
        while ended >= 0 and (begun := text.find(self.begin, ended)) >= 0:
            if self.function.match(text, self._skipped(text, begun + len(self.begin))):
                return begun
            ended = begun + len(self.begin)
        return len(text)

    def _call_goes_on(self, text: str, place: int) -> bool:
        """Return True if the text here is the rest of a call: a parameter, or the closing tags of all."""
        place = self._skipped(text, place)
        if place == len(text) or self.parameter.match(text, place):
            return True
        if self.function_end:
            if not text.startswith(self.function_end, place):
                return False
            place = self._skipped(text, place + len(self.function_end))
            if place == len(text) or self.function.match(text, place):
                return True
        if not text.startswith(self.end, place):
            return False
        place += len(self.end)
        another, begun = text.find(self.end, place), text.find(self.begin, place)
        return another < 0 or 0 <= begun < another  # else the marker is inside a value of this call

    def _places(self, text: str, start: int, limit: int, *tags: str) -> list[int]:
        return [place for tag in tags if tag and (place := text.find(tag, start, limit)) >= 0]

    def _skipped(self, text: str, place: int) -> int:
        """Return the place after blank space."""
        match = _BLANK.match(text, place)
        return match.end() if match else place

    def _unpadded(self, value: str) -> str:
        return value.removeprefix("\n").removesuffix("\n") if self.padded else value

    def cut_in_argument(self, body: str) -> bool:
        """Return True if a parameter has begun: nothing tells whether its value is over."""
        return bool(self.parameter.search(body))


class Qwen3Coder(TaggedValues):
    """`<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`, a tag a line."""

    begin = "<tool_call>"
    end = "</tool_call>"
    ends: ClassVar[tuple[str, ...]] = ("<|im_end|>", "<|endoftext|>")
    function = re.compile(r"<function=(?P<name>[^>\n]*)>")
    function_end = "</function>"
    parameter = re.compile(r"<parameter=(?P<key>[^>\n]*)>")
    parameter_end = "</parameter>"
    padded = True

    def render(self, calls: Sequence[ToolCall]) -> str:
        """Return the calls as the chat template writes them."""
        return "\n".join(f"{self.begin}\n{self._written(call)}\n{self.end}" for call in calls)

    def _written(self, call: ToolCall) -> str:
        lines = [f"<function={call.name}>"]
        for key, value in named_arguments(call).items():
            lines.append(f"<parameter={key}>\n{value_text(value)}\n</parameter>")
        return "\n".join([*lines, "</function>"])

    def claims(self, chat_template: str) -> bool:
        """Return whether the template has the tags of this format's functions."""
        return self.begin in chat_template and "<function=" in chat_template


class MiniMaxM2(TaggedValues):
    """`<minimax:tool_call><invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke></minimax:tool_call>`."""

    begin = "<minimax:tool_call>"
    end = "</minimax:tool_call>"
    ends: ClassVar[tuple[str, ...]] = ("[e~[",)
    function = re.compile(r'<invoke name="(?P<name>[^"\n]*)">')
    function_end = "</invoke>"
    parameter = re.compile(r'<parameter name="(?P<key>[^"\n]*)">')
    parameter_end = "</parameter>"

    def render(self, calls: Sequence[ToolCall]) -> str:
        """Return all calls between one pair of markers, as the chat template writes them."""
        return "\n".join([self.begin, *map(self._written, calls), self.end])

    def _written(self, call: ToolCall) -> str:
        lines = [f'<invoke name="{call.name}">']
        for key, value in named_arguments(call).items():
            lines.append(f'<parameter name="{key}">{value_text(value)}</parameter>')
        return "\n".join([*lines, "</invoke>"])

    def claims(self, chat_template: str) -> bool:
        """Return whether the template has the marker, which no other family has."""
        return self.begin in chat_template
