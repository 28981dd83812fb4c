"""Parsers of DeepSeek's calls between special tokens: V3 and R1 write JSON in a code fence, V3.1 without a fence.

The bars of the tokens are full-width (U+FF5C) and the gaps are U+2581.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

from slime_core.tools import IllFormedCall, ToolCall, ToolSchema
from slime_tool_parsers.parsing import MarkedParser, named_call
from slime_tool_parsers.schema import json_text


def _token(words: str) -> str:
    return "<\uff5c" + words.replace(" ", "\u2581") + "\uff5c>"


SEPARATOR = _token("tool sep")
_ALL_BEGIN, _ALL_END = _token("tool calls begin"), _token("tool calls end")


class _DeepSeek(MarkedParser):
    begin = _token("tool call begin")
    end = _token("tool call end")
    ends: ClassVar[tuple[str, ...]] = (_token("end of sentence"),)
    dropped: ClassVar[tuple[str, ...]] = (_ALL_BEGIN, _ALL_END)


class DeepSeekV3(_DeepSeek):
    """Calls with `function`, the separator, the name, and the arguments in a json fence."""

    before_json = re.compile(rf"[^<]*{re.escape(SEPARATOR)}[^<`]*```(?:json)?\s*")
    _fenced = re.compile(r"\s*(?P<name>[^\s`]+)\s*```(?:json)?\s*(?P<arguments>.*?)\s*```\s*", re.DOTALL)

    def calls_in(self, body: str, tools: Sequence[ToolSchema]) -> list[ToolCall | IllFormedCall]:
        """Parse the body of one call."""
        _, found, rest = body.partition(SEPARATOR)
        match = self._fenced.fullmatch(rest)
        if not found or match is None:
            return [IllFormedCall(body, "expected function, the separator, a name, and arguments in a json fence")]
        return [named_call(match["name"], match["arguments"], body)]

    def render(self, calls: Sequence[ToolCall]) -> str:
        """Render the calls as the template of V3 does."""
        bodies = [
            f"{self.begin}function{SEPARATOR}{call.name}\n```json\n{json_text(call.arguments)}\n```{self.end}"
            for call in calls
        ]
        return _ALL_BEGIN + "\n".join(bodies) + _ALL_END

    def claims(self, chat_template: str) -> bool:
        """Return whether the template has the markers and the fence."""
        return self.begin in chat_template and "```json" in chat_template


class DeepSeekV31(_DeepSeek):
    """Calls with the name, the separator and the arguments."""

    before_json = re.compile(rf"[^<]*{re.escape(SEPARATOR)}\s*")

    def calls_in(self, body: str, tools: Sequence[ToolSchema]) -> list[ToolCall | IllFormedCall]:
        """Parse the body of one call."""
        name, found, arguments = body.partition(SEPARATOR)
        if not found or not name.strip():
            return [IllFormedCall(body, "expected a name, the separator, and arguments")]
        return [named_call(name.strip(), arguments, body)]

    def render(self, calls: Sequence[ToolCall]) -> str:
        """Render the calls as the template of V3.1 does."""
        bodies = [f"{self.begin}{call.name}{SEPARATOR}{json_text(call.arguments)}{self.end}" for call in calls]
        return _ALL_BEGIN + "".join(bodies) + _ALL_END

    def claims(self, chat_template: str) -> bool:
        """Return whether the template has the markers without the fence."""
        return self.begin in chat_template and "```json" not in chat_template
