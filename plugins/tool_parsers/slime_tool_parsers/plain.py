"""`<tool>12*34</tool>` at the end of a turn: the quick start's form, for one tool with one text argument.

A tag anywhere else in the turn is content, so a model may speak of the tool.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from slime_core.tools import IllFormedCall, ToolCall, ToolSchema
from slime_tool_parsers.parsing import ToolParserBase

_CALLS = re.compile(r"(?:<tool>[^<]*</tool>\s*)+(?:<[^<>]*>)?\s*\Z")
"""Calls end the turn; at most the tokenizer's end-of-turn token follows them."""
_BEGUN = re.compile(r"(?:<tool>[^<]*</tool>\s*)*<tool>[^<]*(?:<[^>]*)?\Z")
_CALL = re.compile(r"<tool>([^<]*)</tool>")


class Plain(ToolParserBase):
    """The text between the tags is the only argument of the only tool."""

    def read(self, text: str, tools: Sequence[ToolSchema]) -> tuple[str, list[ToolCall | IllFormedCall]]:
        """The run of calls that ends the turn."""
        match = _CALLS.search(text)
        if match is None:
            return text, []
        return text[: match.start()], [self._call(body, tools) for body in _CALL.findall(match[0])]

    def held_from(self, content: str, tools: Sequence[ToolSchema]) -> int:
        """Calls that end the turn so far are held, the last one perhaps not closed yet."""
        match = _BEGUN.search(content)
        return len(content) if match is None else match.start()

    def _call(self, body: str, tools: Sequence[ToolSchema]) -> ToolCall | IllFormedCall:
        if len(tools) != 1:
            return IllFormedCall(body, f"<tool> names no tool, and there are {len(tools)}")
        function = tools[0]["function"]
        schema = function.get("parameters") or {}
        names = schema.get("required") or list(schema.get("properties", {}))
        if len(names) != 1:
            return IllFormedCall(
                body, f"<tool> has one argument, {function['name']} has {len(names)}", function["name"]
            )
        return ToolCall("", function["name"], {names[0]: body})

    def render(self, calls: Sequence[ToolCall]) -> str:
        """The calls' only argument, in tags."""
        return "".join(f"<tool>{self._only(call)}</tool>" for call in calls)

    def _only(self, call: ToolCall) -> str:
        values = [call.arguments] if isinstance(call.arguments, str) else list(call.arguments.values())
        if len(values) != 1 or not isinstance(values[0], str) or "<" in values[0]:
            raise ValueError(f"call of {call.name}: <tool> has one text argument without '<'; got {call.arguments!r}")
        return values[0]

    def claims(self, chat_template: str) -> bool:
        """Templates that name the tag."""
        return "<tool>" in chat_template
