"""Contract tests for tools and for parsers of tool calls."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from slime_generators.tool_use import call_tool
from slime_tool_parsers import Tool, argument_problem

from slime_core.plugins.signatures import construct
from slime_core.tools import ToolCall, ToolParser, ToolSchema
from slime_testing_contracts.base import Contract, only_where

_WEATHER: ToolSchema = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}


class ToolParserContract(Contract):
    """Check that rendered calls are parsed again, and that no text of a model raises."""

    kind = "tool_parsers"
    tools: ClassVar[Sequence[ToolSchema]] = (_WEATHER,)
    calls: ClassVar[Sequence[ToolCall]] = (
        ToolCall("", "weather", {"city": "Oslo", "days": 2}),
        ToolCall("", "weather", {"city": "S\u00e3o Paulo"}),
    )
    """Calls of `tools` that the format can write in one turn."""
    ill_formed: ClassVar[Sequence[str]] = ()
    """Turns with a call that cannot be read."""
    chat_template: ClassVar[str] = ""
    """Part of a chat template that the parser claims; empty for a parser that is chosen by name only."""

    @property
    def parser(self) -> ToolParser:
        """The parser, constructed as a run does."""
        found = self.resolved.obj
        made: ToolParser = construct(found, None) if isinstance(found, type) else found
        return made

    def test_calls_that_were_written_are_read(self) -> None:
        """Render and parse one call and several calls; ids are not compared."""
        for count in range(1, len(self.calls) + 1):
            written = self.parser.render(self.calls[:count])
            turn = self.parser.parse(written, self.tools)
            read = [(call.name, call.arguments) for call in turn.calls]
            expected = [(call.name, call.arguments) for call in self.calls[:count]]
            assert read == expected, f"of {written!r} was read {read}, not {expected}"
            assert not turn.ill_formed, f"in {written!r} cannot be read: {turn.ill_formed}"

    def test_a_turn_without_a_call_is_content(self) -> None:
        """Check a turn of words, and an empty turn."""
        for text in ("The weather is fine.", ""):
            turn = self.parser.parse(text, self.tools)
            assert (turn.content, turn.attempts) == (text, ()), f"{text!r} is content; found {turn}"

    def test_calls_that_cannot_be_read_are_reported(self) -> None:
        """Check that each ill-formed call has a one-line reason for the model."""
        for text in self.ill_formed:
            turn = self.parser.parse(text, self.tools)
            assert turn.ill_formed, f"{text!r} has a call that cannot be read; found {turn}"
            assert all(bad.problem and "\n" not in bad.problem for bad in turn.ill_formed)

    def test_nothing_a_model_may_write_raises(self) -> None:
        """Parse every prefix and every suffix of a turn with calls."""
        parser = self.parser  # construction finds and reads the source, which takes longer than parsing
        written = parser.render(self.calls[:1])
        for cut in range(len(written) + 1):
            for text in (written[:cut], written[cut:]):
                parser.parse(text, self.tools)
                parser.parse(text)

    def test_the_chat_template_is_claimed(self) -> None:
        """Check that the parser claims its own chat template, and not an arbitrary one."""
        assert not self.parser.claims("{% for m in messages %}{{ m.content }}{% endfor %}")
        if self.chat_template:
            assert self.parser.claims(self.chat_template)


class ToolContract(Contract):
    """Check that tools have a schema, and that their calls end."""

    kind = "tools"
    examples: ClassVar[Sequence[tuple[str, Mapping[str, Any], str]]] = ()
    """Example calls: (tool, arguments, result that the model sees)."""

    @property
    def tools(self) -> dict[str, Tool]:
        """The tools by name."""
        found = self.resolved.obj
        made = [Tool.of(each) for each in (found if isinstance(found, (list, tuple)) else [found])]
        return {tool.name: tool for tool in made}

    def test_every_tool_says_what_it_does(self) -> None:
        """Check that every tool has a description, which is all that the model knows about it."""
        silent = [name for name, tool in self.tools.items() if not tool.schema["function"].get("description")]
        assert not silent, f"without a description: {', '.join(silent)}; write a docstring"

    @only_where(lambda suite: suite.examples)
    def test_examples(self) -> None:
        """Check that the arguments fit the schema, and the results match the examples."""
        for name, arguments, expected in self.examples:
            tool = self.tools[name]
            problem = argument_problem(arguments, tool.schema["function"]["parameters"])
            assert problem is None, f"{name} {arguments}: {problem}"
            result = asyncio.run(call_tool(tool, arguments, deadline=60.0, args=self.settings))
            assert result.text == expected, f"{name} {arguments}: {result.text!r}, not {expected!r}"
