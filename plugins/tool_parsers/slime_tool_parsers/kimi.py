"""Parser of Kimi K2's calls: `functions.NAME:INDEX` (also the call's id) and JSON arguments between special tokens."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

from slime_core.tools import IllFormedCall, ToolCall, ToolSchema
from slime_tool_parsers.parsing import MarkedParser, named_call
from slime_tool_parsers.schema import json_text

_ALL_BEGIN, _ALL_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_ARGUMENTS = "<|tool_call_argument_begin|>"
_ID = re.compile(r"(?:functions\.)?(?P<name>[A-Za-z0-9_.-]+):\d+")


class KimiK2(MarkedParser):
    """A parser that reads a call's name from its id; a call without a readable id is ill-formed."""

    begin = "<|tool_call_begin|>"
    end = "<|tool_call_end|>"
    ends: ClassVar[tuple[str, ...]] = ("<|im_end|>", "[EOS]")
    dropped: ClassVar[tuple[str, ...]] = (_ALL_BEGIN, _ALL_END)
    before_json = re.compile(rf"[^<]*{re.escape(_ARGUMENTS)}\s*")

    def calls_in(self, body: str, tools: Sequence[ToolSchema]) -> list[ToolCall | IllFormedCall]:
        """Parse the body of a call; return a list with the call, or with an ill-formed call."""
        id, found, arguments = body.partition(_ARGUMENTS)
        match = _ID.fullmatch(id.strip())
        if not found or match is None:
            return [IllFormedCall(body, f"expected functions.NAME:INDEX, {_ARGUMENTS} and arguments")]
        return [named_call(match["name"], arguments, body, id.strip())]

    def render(self, calls: Sequence[ToolCall]) -> str:
        """Return the calls in the chat template's format; calls without an id are numbered from 0."""
        bodies = [
            f"{self.begin}{call.id or f'functions.{call.name}:{i}'}{_ARGUMENTS}{json_text(call.arguments)}{self.end}"
            for i, call in enumerate(calls)
        ]
        return _ALL_BEGIN + "".join(bodies) + _ALL_END

    def claims(self, chat_template: str) -> bool:
        """Return whether a template has the marker of arguments or of the section, which only Kimi K2 uses."""
        return self.begin in chat_template and (_ARGUMENTS in chat_template or _ALL_BEGIN in chat_template)
