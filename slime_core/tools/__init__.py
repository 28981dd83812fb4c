"""Tool calls in text <-> tool calls as values, and what a tool schema allows.

Generators and the agents' HTTP endpoints call it. Standard library only at import time. Nothing here runs a tool or
knows a model family; families are components of the kind `tool_parsers`, and which one a run uses is decided by
`slime_core.data.tools.tool_parser`.
"""

from slime_core.tools.calls import IllFormedCall, ParsedTurn, ToolCall, ToolParser, ToolSchema
from slime_core.tools.functions import Tool, schema_of
from slime_core.tools.parsing import (
    MarkedParser,
    ToolParserBase,
    call_of,
    json_call,
    json_objects,
    named_call,
    read_json,
)
from slime_core.tools.reasoning import split_reasoning
from slime_core.tools.schema import (
    argument_problem,
    call_problem,
    check_tool,
    check_tools,
    json_text,
    parameters_of,
    typed_value,
)

__all__ = [
    "IllFormedCall",
    "MarkedParser",
    "ParsedTurn",
    "Tool",
    "ToolCall",
    "ToolParser",
    "ToolParserBase",
    "ToolSchema",
    "argument_problem",
    "call_problem",
    "call_of",
    "check_tool",
    "check_tools",
    "json_call",
    "json_objects",
    "json_text",
    "named_call",
    "parameters_of",
    "read_json",
    "schema_of",
    "split_reasoning",
    "typed_value",
]
