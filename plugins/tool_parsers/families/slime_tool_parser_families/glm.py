"""GLM's two forms: name and JSON on lines of their own (GLM-4), and key and value in tags (GLM-4.5 and later)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

from slime_core.tools import IllFormedCall, ToolCall, ToolSchema, json_text
from slime_tool_parser_families.parsing import MarkedParser, ToolParserBase, named_call
from slime_tool_parser_families.xml_values import typed_arguments, value_text

_ENDS = ("<|observation|>", "<|user|>", "<|endoftext|>")
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class Glm45(MarkedParser):
    """`<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`, with or without newlines."""

    begin = "<tool_call>"
    end = "</tool_call>"
    ends: ClassVar[tuple[str, ...]] = _ENDS

    _pair = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)

    def calls_in(self, body: str, tools: Sequence[ToolSchema]) -> list[ToolCall | IllFormedCall]:
        """One call."""
        name, tag, rest = body.partition("<arg_key>")
        name = name.strip()
        if not _NAME.fullmatch(name):
            return [IllFormedCall(body, "the call has no name")]
        pairs = tag + rest
        if self._pair.sub("", pairs).strip():
            return [IllFormedCall(body, "text between <arg_key> and <arg_value> pairs", name)]
        values = {key.strip(): value for key, value in self._pair.findall(pairs)}
        return [ToolCall("", name, typed_arguments(name, values, tools))]

    def render(self, calls: Sequence[ToolCall]) -> str:
        """As GLM-4.5's template writes them."""
        return "\n".join(f"{self.begin}{self._body(call)}\n{self.end}" for call in calls)

    def _body(self, call: ToolCall) -> str:
        if isinstance(call.arguments, str):
            raise ValueError(f"call of {call.name}: arguments in tags have names; got text")
        lines = [call.name]
        for key, value in call.arguments.items():
            lines += [f"<arg_key>{key}</arg_key>", f"<arg_value>{value_text(value)}</arg_value>"]
        return "\n".join(lines)

    def claims(self, chat_template: str) -> bool:
        """The tag of a key."""
        return "<arg_key>" in chat_template


class Glm4(ToolParserBase):
    """`NAME`, a newline, and a JSON object, as a turn of its own; several calls are told apart by `<|assistant|>`.

    Nothing marks a call, so only the name of a tool followed by what begins like an object is one.
    """

    ends: ClassVar[tuple[str, ...]] = _ENDS

    def read(self, text: str, tools: Sequence[ToolSchema]) -> tuple[str, list[ToolCall | IllFormedCall]]:
        """Turns that are calls, and the others as content."""
        known = {str(tool["function"]["name"]) for tool in tools}
        content: list[str] = []
        attempts: list[ToolCall | IllFormedCall] = []
        for turn in text.split("<|assistant|>"):
            name, _, body = turn.strip().partition("\n")
            if _NAME.fullmatch(name.strip()) and body.lstrip().startswith("{") and (name.strip() in known or not known):
                attempts.append(named_call(name.strip(), body, turn))
            else:
                content.append(turn)
        return "".join(content), attempts

    def render(self, calls: Sequence[ToolCall]) -> str:
        """As the template of GLM-4 writes them."""
        return "<|assistant|>".join(f"{call.name}\n{json_text(call.arguments)}" for call in calls)

    def claims(self, chat_template: str) -> bool:
        """The turn that answers a call, without the tags of later models."""
        return "<|observation|>" in chat_template and "<arg_key>" not in chat_template
