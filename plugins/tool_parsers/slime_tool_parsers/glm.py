"""Parse the two formats of GLM: name and JSON on separate lines (GLM-4), key and value in tags (from GLM-4.5)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

from slime_core.tools import ToolCall, ToolSchema
from slime_tool_parsers.parsing import Attempt, ToolParserBase, named_call, tool_names
from slime_tool_parsers.schema import json_text
from slime_tool_parsers.values import json_end
from slime_tool_parsers.xml_values import TaggedValues, named_arguments, value_text

_ENDS = ("<|observation|>", "<|user|>", "<|endoftext|>")
_NEXT = "<|assistant|>"
_CALL = re.compile(r"\s*(?P<name>[A-Za-z0-9_.-]{1,64})[ \t]*\n\s*(?=\{)")


class Glm45(TaggedValues):
    """`<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`, with or without newlines."""

    begin = "<tool_call>"
    end = "</tool_call>"
    ends: ClassVar[tuple[str, ...]] = _ENDS
    function = re.compile(r"(?P<name>[A-Za-z0-9_.-]{1,64})\s*(?=<arg_key>|</tool_call>|\Z)")
    function_end = ""
    parameter = re.compile(r"<arg_key>(?P<key>[^<]*)</arg_key>\s*<arg_value>")
    parameter_end = "</arg_value>"

    def render(self, calls: Sequence[ToolCall]) -> str:
        """Write calls in the format of GLM-4.5's template."""
        return "\n".join(f"{self.begin}{self._written(call)}\n{self.end}" for call in calls)

    def _written(self, call: ToolCall) -> str:
        lines = [call.name]
        for key, value in named_arguments(call).items():
            lines += [f"<arg_key>{key}</arg_key>", f"<arg_value>{value_text(value)}</arg_value>"]
        return "\n".join(lines)

    def claims(self, chat_template: str) -> bool:
        """Return True if the template has the tag of a key."""
        return "<arg_key>" in chat_template


class Glm4(ToolParserBase):
    """`NAME`, a newline, and a JSON object, as a separate turn; `<|assistant|>` separates several calls.

    A call has no marker, so only a tool's name followed by the beginning of an object is a call.
    """

    ends: ClassVar[tuple[str, ...]] = _ENDS

    def read(self, text: str, tools: Sequence[ToolSchema]) -> tuple[str, list[Attempt]]:
        """Read the calls, and return all other turns as content."""
        known = tool_names(tools)
        content: list[str] = []
        attempts: list[Attempt] = []
        place = 0
        while place < len(text):
            call = _CALL.match(text, place)
            named = call is not None and (call["name"] in known or not known)
            end = text.find(_NEXT, json_end(text, call.end()) if call and named else place)
            turn = text[place : end if end >= 0 else len(text)]
            if call and named:
                attempts.append(named_call(call["name"], text[call.end() : place + len(turn)], turn))
            else:
                content.append(turn)
            place += len(turn) + len(_NEXT)
        return "".join(content), attempts

    def held_from(self, content: str, tools: Sequence[ToolSchema]) -> int:
        """Return the index from which content is held back: a last turn that may begin a tool's name."""
        start = content.rfind(_NEXT) + len(_NEXT) if _NEXT in content else 0
        return start if any(name.startswith(content[start:].strip()) for name in tool_names(tools)) else len(content)

    def render(self, calls: Sequence[ToolCall]) -> str:
        """Write calls in the format of GLM-4's template."""
        return _NEXT.join(f"{call.name}\n{json_text(call.arguments)}" for call in calls)

    def claims(self, chat_template: str) -> bool:
        """Return True if the template has the turn for a tool's result, but not the tags of later models."""
        return "<|observation|>" in chat_template and "<arg_key>" not in chat_template
