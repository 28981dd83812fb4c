"""The parts of a parsed assistant turn, and the protocol of tool-call parsers; public to plugins.

A call that cannot be parsed is not dropped. It stays in place among the calls as an `IllFormedCall`, so that the model
can receive a description of the problem. The opening tag of reasoning is often not in the turn, because the chat
template put it into the prompt: a closing tag without an opening one ends reasoning that began with the turn.

The names in `_OF_PLUGIN` are those of `slime_tool_parsers`: tools made of functions, and checks of their schemas.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from slime_core.lazy import from_plugin

_OF_PLUGIN = (
    "Tool", "argument_problem", "call_problem", "check_tool", "check_tools", "json_text", "parameters_of", "schema_of",
)  # fmt: skip
__all__ = ["IllFormedCall", "ParsedTurn", "ToolCall", "ToolParser", "ToolSchema", "split_reasoning", *_OF_PLUGIN]

ToolSchema: TypeAlias = Mapping[str, Any]
"""OpenAI's form: `{"type": "function", "function": {"name", "description", "parameters": JSON schema}}`."""


@dataclass(frozen=True)
class ToolCall:
    """A tool call written by the model."""

    id: str
    """Call id as the model wrote it; empty in formats without ids."""
    name: str
    arguments: dict[str, Any] | str
    """Arguments by parameter name. Text if the format has one unnamed argument, or if another program parsed the call
    and its arguments are not a JSON object."""


@dataclass(frozen=True)
class IllFormedCall:
    """Text that begins like a call but cannot be parsed as a call."""

    text: str
    """Text between the markers."""
    problem: str
    """Description of the problem for the model, in one line."""
    name: str = ""
    """The tool's name, if it could be parsed."""
    id: str = ""


@dataclass(frozen=True)
class ParsedTurn:
    """A parsed assistant turn."""

    content: str = ""
    """Text outside of calls and reasoning, stripped of surrounding whitespace."""
    reasoning: str = ""
    """Text inside the reasoning tags."""
    attempts: tuple[ToolCall | IllFormedCall, ...] = ()
    """Parsed and ill-formed calls, in the order of the text."""
    reasoning_open: bool = False
    """True if the turn ended inside its reasoning; it then has no calls."""

    @property
    def calls(self) -> list[ToolCall]:
        """Return the calls that could be parsed."""
        return [attempt for attempt in self.attempts if isinstance(attempt, ToolCall)]

    @property
    def ill_formed(self) -> list[IllFormedCall]:
        """Return the calls that could not be parsed."""
        return [attempt for attempt in self.attempts if isinstance(attempt, IllFormedCall)]


class ToolParser(Protocol):
    """The tool-call format of a model family. Constructed without arguments; keeps no state between calls.

    Derive from `slime_tool_parsers.ToolParserBase`, which implements everything except the format of a call.
    """

    def parse(self, text: str, tools: Sequence[ToolSchema] = (), *, reasoning_open: bool = False) -> ParsedTurn:
        """Parse a turn.

        Args:
            text: The turn, decoded with special tokens; it may contain the tokens that end a turn.
            tools: Available tools. Formats with unquoted values take the types from the schemas; names are not checked.
            reasoning_open: True if the prompt ended inside the reasoning, so that the turn begins there.
        """

    def render(self, calls: Sequence[ToolCall]) -> str:
        """Return the text of the calls as the model family writes it; `parse` restores the calls, except their ids."""

    def claims(self, chat_template: str) -> bool:
        """Return True if the chat template uses this family's format; `--tool-call-parser auto` decides by this."""


OPEN, CLOSE = "<think>", "</think>"


def split_reasoning(
    text: str,
    *,
    opened: bool = False,
    tags: tuple[str, str] = (OPEN, CLOSE),
    call_begun: Callable[[str], bool] = lambda before: False,
) -> tuple[str, str, bool]:
    """Return (reasoning, rest, True if the turn ended inside its reasoning).

    Args:
        text: The turn.
        opened: The prompt ended inside the reasoning.
        tags: Opening and closing tag.
        call_begun: Returns True if a beginning of the turn has a call, so that a closing tag after it closes nothing.
            Asked only of a turn whose reasoning was not opened.
    """
    start, end = tags
    body = text.lstrip()
    began = body.startswith(start)
    if began:
        body = body[len(start) :]
    elif not opened:
        at = body.find(end)
        if at < 0 or 0 <= body.find(start) < at or call_begun(body[:at]):
            return "", text, False  # no closing tag, a quoted pair, or a tag after a call began
    reasoning, closed, rest = body.partition(end)
    return reasoning.strip(), rest if closed else "", not closed


def __getattr__(name: str) -> Any:
    parsing = "MarkedParser ToolParserBase call_of json_call json_objects named_call read_json typed_value"
    if name in parsing.split():
        raise ImportError(f"slime_core.tools has no {name}; type: from slime_tool_parsers import {name}")
    if name in _OF_PLUGIN:
        return from_plugin(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
