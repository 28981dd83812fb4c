"""Tool calls in text <-> tool calls as values, and what a tool schema allows.

Generators and the agents' HTTP endpoints call it. Standard library only at import time. Nothing here runs a tool or
knows a model family; families are components of the kind `tool_parsers`, and which one a run uses is decided by
`slime_core.data.tools.tool_parser`.
"""

from typing import Any

from slime_core.tools.calls import IllFormedCall, ParsedTurn, ToolCall, ToolParser, ToolSchema, split_reasoning
from slime_core.tools.functions import Tool, schema_of
from slime_core.tools.schema import (
    argument_problem,
    call_problem,
    check_tool,
    check_tools,
    json_text,
    parameters_of,
)

__all__ = [
    "IllFormedCall",
    "ParsedTurn",
    "Tool",
    "ToolCall",
    "ToolParser",
    "ToolSchema",
    "argument_problem",
    "call_problem",
    "check_tool",
    "check_tools",
    "json_text",
    "parameters_of",
    "schema_of",
    "split_reasoning",
]


def __getattr__(name: str) -> Any:
    parsing = "MarkedParser ToolParserBase call_of json_call json_objects named_call read_json typed_value"
    if name in parsing.split():
        raise ImportError(f"slime_core.tools has no {name}; type: from slime_tool_parsers import {name}")
    raise AttributeError(f"module 'slime_core.tools' has no attribute {name!r}")
