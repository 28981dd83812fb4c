"""Settings of tools: what a model may call, and how it writes calls."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from slime_core.config.sections.base import SPEC, Flag, Section


class ToolArgs(Section):
    """Tools."""

    tools_path: Annotated[list[str], Flag(append=True)] = Field(default_factory=list)
    """Something the model may call: a plugin name or path to a function with annotations, or to a list of them; its
    schema is given to the chat template. Repeatable."""
    tool_call_parser: Annotated[str, SPEC] = "auto"
    """How the model writes tool calls: a parser's name or path; auto takes the one that knows the chat template."""
