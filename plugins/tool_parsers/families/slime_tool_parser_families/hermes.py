"""`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen2.5, Qwen3 and many derived from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from slime_core.tools import IllFormedCall, ToolCall, ToolSchema, json_text
from slime_tool_parser_families.parsing import MarkedParser, json_call


class Hermes(MarkedParser):
    """One JSON object per pair of tags; the newlines around it are usual and not needed."""

    begin = "<tool_call>"
    end = "</tool_call>"
    ends: ClassVar[tuple[str, ...]] = ("<|im_end|>", "<|endoftext|>")

    def calls_in(self, body: str, tools: Sequence[ToolSchema]) -> list[ToolCall | IllFormedCall]:
        """One call."""
        return [json_call(body.strip())]

    def render(self, calls: Sequence[ToolCall]) -> str:
        """As Qwen's template writes them."""
        bodies = (json_text({"name": call.name, "arguments": call.arguments}) for call in calls)
        return "\n".join(f"{self.begin}\n{body}\n{self.end}" for body in bodies)

    def claims(self, chat_template: str) -> bool:
        """The tags, without the markers of those who put something else than JSON between them."""
        return self.begin in chat_template and not any(m in chat_template for m in ("<function=", "<arg_key>"))
