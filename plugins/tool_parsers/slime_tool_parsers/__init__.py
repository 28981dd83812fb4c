"""Assistant turns as published model families write them <-> tool calls.

Components of the kind `tool_parsers`, one class per form; `--tool-call-parser NAME` chooses one, `auto` the one that
claims the chat template. The parsers read decoded text, special tokens kept, since the markers of several families are
ordinary text to their tokenizers. A parser of your own derives from a class of `parsing.py`, too.
"""

from slime_tool_parsers.functions import Tool, schema_of
from slime_tool_parsers.parsing import (
    MarkedParser,
    ToolParserBase,
    call_of,
    json_call,
    json_objects,
    named_call,
)
from slime_tool_parsers.schema import (
    argument_problem,
    call_problem,
    check_tool,
    check_tools,
    json_text,
    parameters_of,
)
from slime_tool_parsers.values import read_json, typed_value

__all__ = [
    "MarkedParser",
    "Tool",
    "ToolParserBase",
    "argument_problem",
    "call_of",
    "call_problem",
    "check_tool",
    "check_tools",
    "json_call",
    "json_objects",
    "json_text",
    "named_call",
    "parameters_of",
    "read_json",
    "schema_of",
    "typed_value",
]
