"""Calls whose values stand in tags, without quotes: Qwen3-Coder's and MiniMax-M2's.

The text alone does not tell `5` from `"5"`; the tools' schemas do (`slime_core.tools.typed_value`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from slime_core.tools import IllFormedCall, ToolCall, ToolSchema, json_text, parameters_of, typed_value
from slime_tool_parser_families.parsing import MarkedParser


def value_text(value: Any) -> str:
    """A value as it stands in its tags."""
    return value if isinstance(value, str) else json_text(value)


def typed_arguments(name: str, values: Mapping[str, str], tools: Sequence[ToolSchema]) -> dict[str, Any]:
    """The values, each as the tool's schema wants it."""
    properties = (parameters_of(tools, name) or {}).get("properties", {})
    return {key: typed_value(text, properties.get(key)) for key, text in values.items()}


class _TaggedValues(MarkedParser):
    """Functions in tags, with parameters in tags."""

    function: ClassVar[re.Pattern[str]]
    """`name` and `body`, up to the next function; `closed` is its closing tag."""
    parameter: ClassVar[re.Pattern[str]]
    """`key` and `value`; `closed` is its closing tag."""
    padded = False
    """One newline on each side of a value is no part of it."""

    def calls_in(self, body: str, tools: Sequence[ToolSchema]) -> list[ToolCall | IllFormedCall]:
        """The functions; anything else between the markers is ill-formed."""
        found = [self._call(match, tools) for match in self.function.finditer(body)]
        rest = self.function.sub("", body).strip()
        if rest or not found:
            found.append(IllFormedCall(body, "text between the markers that is no function call"))
        return found

    def _call(self, match: re.Match[str], tools: Sequence[ToolSchema]) -> ToolCall | IllFormedCall:
        name, body = match["name"].strip(), match["body"]
        if not name:
            return IllFormedCall(match[0], "the call has no name")
        if not match["closed"]:
            return IllFormedCall(match[0], "the function has no closing tag", name)
        values: dict[str, str] = {}
        for parameter in self.parameter.finditer(body):
            if not parameter["closed"]:
                return IllFormedCall(match[0], f"parameter {parameter['key']} has no closing tag", name)
            values[parameter["key"]] = self._unpadded(parameter["value"])
        if self.parameter.sub("", body).strip():
            return IllFormedCall(match[0], "text between the parameters", name)
        return ToolCall("", name, typed_arguments(name, values, tools))

    def _unpadded(self, value: str) -> str:
        return value.removeprefix("\n").removesuffix("\n") if self.padded else value


class Qwen3Coder(_TaggedValues):
    """`<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`, a tag a line."""

    begin = "<tool_call>"
    end = "</tool_call>"
    ends: ClassVar[tuple[str, ...]] = ("<|im_end|>", "<|endoftext|>")
    function = re.compile(r"<function=(?P<name>[^>\n]*)>(?P<body>.*?)(?P<closed></function>|\Z)", re.DOTALL)
    parameter = re.compile(r"<parameter=(?P<key>[^>\n]*)>(?P<value>.*?)(?P<closed></parameter>|\Z)", re.DOTALL)
    padded = True

    def render(self, calls: Sequence[ToolCall]) -> str:
        """As the chat template writes them."""
        return "\n".join(f"{self.begin}\n{self._function(call)}\n{self.end}" for call in calls)

    def _function(self, call: ToolCall) -> str:
        lines = [f"<function={call.name}>"]
        for key, value in _named(call).items():
            lines.append(f"<parameter={key}>\n{value_text(value)}\n</parameter>")
        return "\n".join([*lines, "</function>"])

    def claims(self, chat_template: str) -> bool:
        """The tags of its functions."""
        return self.begin in chat_template and "<function=" in chat_template


class MiniMaxM2(_TaggedValues):
    """`<minimax:tool_call><invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke></minimax:tool_call>`."""

    begin = "<minimax:tool_call>"
    end = "</minimax:tool_call>"
    ends: ClassVar[tuple[str, ...]] = ("[e~[",)
    function = re.compile(r'<invoke name="(?P<name>[^"\n]*)">(?P<body>.*?)(?P<closed></invoke>|\Z)', re.DOTALL)
    parameter = re.compile(r'<parameter name="(?P<key>[^"\n]*)">(?P<value>.*?)(?P<closed></parameter>|\Z)', re.DOTALL)

    def render(self, calls: Sequence[ToolCall]) -> str:
        """All calls between one pair of markers, as the chat template writes them."""
        return "\n".join([self.begin, *map(self._invoke, calls), self.end])

    def _invoke(self, call: ToolCall) -> str:
        lines = [f'<invoke name="{call.name}">']
        for key, value in _named(call).items():
            lines.append(f'<parameter name="{key}">{value_text(value)}</parameter>')
        return "\n".join([*lines, "</invoke>"])

    def claims(self, chat_template: str) -> bool:
        """The marker, which nobody else has."""
        return self.begin in chat_template


def _named(call: ToolCall) -> dict[str, Any]:
    if isinstance(call.arguments, str):
        raise ValueError(f"call of {call.name}: arguments in tags have names; got text")
    return call.arguments
