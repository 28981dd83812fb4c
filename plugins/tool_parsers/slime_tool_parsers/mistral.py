"""Mistral's calls behind `[TOOL_CALLS]`: a JSON list (7B v0.3 to Small 3.1), or name and JSON (Small 3.2, Devstral).

Both parsers read both forms, but write different forms. A call has no end marker; it ends with its JSON.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, ClassVar

from slime_core.tools import IllFormedCall, ToolCall, ToolSchema
from slime_tool_parsers.parsing import Attempt, ToolParserBase, call_of, named_call
from slime_tool_parsers.schema import json_text
from slime_tool_parsers.values import json_end, read_json

_MARKER, _ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_NAMED = re.compile(r"\s*(?P<name>[A-Za-z0-9_.-]{1,64})\s*(?:\[CALL_ID\]\s*(?P<id>\w*)\s*)?(?:\[ARGS\])?\s*(?=\{)")
_TAGS = (ToolParserBase.reasoning_tags, ("[THINK]", "[/THINK]"))


class Mistral(ToolParserBase):
    """`[TOOL_CALLS] [{"name": ..., "arguments": {...}, "id": ...}]`."""

    ends: ClassVar[tuple[str, ...]] = ("</s>",)

    def tags_of(self, text: str) -> tuple[str, str]:
        """Return `[THINK]` and `[/THINK]` (Magistral) if the turn begins with `[THINK]`, or `[/THINK]` comes first."""
        begun = next((tags for tags in _TAGS if text.lstrip().startswith(tags[0])), None)
        closed = [(text.find(tags[1]), tags) for tags in _TAGS if tags[1] in text]
        return begun or min(closed, default=(0, self.reasoning_tags))[1]

    def read(self, text: str, tools: Sequence[ToolSchema]) -> tuple[str, list[Attempt]]:
        """Read the calls after each marker; text after their JSON is content."""
        content, marked, rest = text.partition(_MARKER)
        attempts: list[Attempt] = []
        while marked:
            named = _NAMED.match(rest)
            start = named.end() if named else len(rest) - len(rest.lstrip())
            stop = json_end(rest, start)
            if stop == start:  # not JSON, or cut short
                stop = found if (found := rest.find(_MARKER)) >= 0 else len(rest)
            body = rest[:stop].strip()
            if named:
                attempts.append(named_call(named["name"], rest[start:stop], body, named["id"] or ""))
            else:
                attempts += self._listed(body)
            more, marked, rest = rest[stop:].partition(_MARKER)
            content += more
        return content, attempts

    def _listed(self, body: str) -> list[Attempt]:
        try:
            value = read_json(body)
        except ValueError as error:
            return [IllFormedCall(body, f"not JSON: {error}")]
        calls: list[Any] = value if isinstance(value, list) else [value]
        return [self._identified(call_of(call, body), call) for call in calls] or [IllFormedCall(body, "no call")]

    def _identified(self, attempt: Attempt, written: Any) -> Attempt:
        if isinstance(attempt, ToolCall) and isinstance(written.get("id"), str):
            return ToolCall(written["id"], attempt.name, attempt.arguments)
        return attempt

    def render(self, calls: Sequence[ToolCall]) -> str:
        """Write the calls like templates with a JSON list; a call without an id gets none."""
        listed = [
            {"name": call.name, "arguments": call.arguments, **({"id": call.id} if call.id else {})} for call in calls
        ]
        return f"{_MARKER} {json_text(listed)}"

    def claims(self, chat_template: str) -> bool:
        """Return whether the template has the marker of calls, but not the marker of arguments."""
        return _MARKER in chat_template and _ARGUMENTS not in chat_template


class MistralNamed(Mistral):
    """`[TOOL_CALLS]NAME[ARGS]{...}`, with or without `[CALL_ID]ID` behind the name; the marker before each call."""

    def render(self, calls: Sequence[ToolCall]) -> str:
        """Write the calls like the templates since Small 3.2."""
        return "".join(self._written(call) for call in calls)

    def _written(self, call: ToolCall) -> str:
        ident = f"{_ID}{call.id}" if call.id else ""
        return f"{_MARKER}{call.name}{ident}{_ARGUMENTS}{json_text(call.arguments)}"

    def claims(self, chat_template: str) -> bool:
        """Return whether the template has both markers."""
        return _MARKER in chat_template and _ARGUMENTS in chat_template
