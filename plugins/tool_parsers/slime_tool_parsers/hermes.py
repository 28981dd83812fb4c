"""`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen2.5, Qwen3 and many derived from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from slime_core.tools import IllFormedCall, ToolCall, ToolSchema
from slime_tool_parsers.parsing import MarkedParser, json_call
from slime_tool_parsers.schema import json_text


class Hermes(MarkedParser):
    """A parser for one JSON object per pair of tags; the usual newlines around the object are optional."""

    begin = "<tool_call>"
    end = "</tool_call>"
    ends: ClassVar[tuple[str, ...]] = ("<|im_end|>", "<|endoftext|>")

    def calls_in(self, body: str, tools: Sequence[ToolSchema]) -> list[ToolCall | IllFormedCall]:
        """Return the one call in the body."""
        return [json_call(body.strip())]

    def render(self, calls: Sequence[ToolCall]) -> str:
        """Return the calls as Qwen's template writes them."""
        bodies = (json_text({"name": call.name, "arguments": call.arguments}) for call in calls)
        return "\n".join(f"{self.begin}\n{body}\n{self.end}" for body in bodies)

    def claims(self, chat_template: str) -> bool:
        """Return True if the template has the tags, but no markers of formats without JSON between the tags."""
        return self.begin in chat_template and not any(m in chat_template for m in ("<function=", "<arg_key>"))
