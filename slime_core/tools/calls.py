"""What a parsed assistant turn is made of, and the protocol of the parsers that make it.

A call that cannot be read is not dropped. It is an `IllFormedCall` in its place among the calls, so that the model can
be told what was wrong with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

ToolSchema: TypeAlias = Mapping[str, Any]
"""OpenAI's form: `{"type": "function", "function": {"name", "description", "parameters": JSON schema}}`."""


@dataclass(frozen=True)
class ToolCall:
    """One call that the model wrote."""

    id: str
    """As the model wrote it; empty in formats that have none."""
    name: str
    arguments: dict[str, Any] | str
    """By parameter name. Text where the format has one unnamed argument, or for a call told by somebody else whose
    arguments are no JSON object."""


@dataclass(frozen=True)
class IllFormedCall:
    """Text that begins like a call and cannot be read as one."""

    text: str
    """What stands between the markers."""
    problem: str
    """Why, for the model to read: one line."""
    name: str = ""
    """The tool's name, where that much could be read."""
    id: str = ""


@dataclass(frozen=True)
class ParsedTurn:
    """One assistant turn taken apart."""

    content: str = ""
    """Text outside of calls and reasoning, without blank space around it."""
    reasoning: str = ""
    """What stood inside the reasoning tags."""
    attempts: tuple[ToolCall | IllFormedCall, ...] = ()
    """Calls, readable or not, in the order of the text."""
    reasoning_open: bool = False
    """The turn ended inside its reasoning: nothing in it is a call."""

    @property
    def calls(self) -> list[ToolCall]:
        """The calls that could be read."""
        return [attempt for attempt in self.attempts if isinstance(attempt, ToolCall)]

    @property
    def ill_formed(self) -> list[IllFormedCall]:
        """The calls that could not."""
        return [attempt for attempt in self.attempts if isinstance(attempt, IllFormedCall)]


class ToolParser(Protocol):
    """How one model family writes calls. Constructed without arguments; keeps no state between calls.

    Derive from `slime_tool_parser_families.ToolParserBase`, which has everything but the calls' own form.
    """

    def parse(self, text: str, tools: Sequence[ToolSchema] = (), *, reasoning_open: bool = False) -> ParsedTurn:
        """Take a turn apart.

        Args:
            text: The turn decoded with special tokens kept; the tokens that end a turn may be in it.
            tools: What may be called. Formats that write values without quotes take their types from the schemas;
                names are not checked here.
            reasoning_open: The prompt ended inside the reasoning, so the turn began there.
        """

    def render(self, calls: Sequence[ToolCall]) -> str:
        """The text a model of the family writes for the calls; `parse` gives them back, ids apart."""

    def claims(self, chat_template: str) -> bool:
        """Whether the chat template asks for this family's calls: how `--tool-call-parser auto` decides."""
