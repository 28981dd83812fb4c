"""Assistant turns as published model families write them <-> tool calls.

Components of the kind `tool_parsers`, one class per form; `--tool-call-parser NAME` chooses one, `auto` the one that
claims the chat template. The parsers read decoded text, special tokens kept, since the markers of several families are
ordinary text to their tokenizers. A parser of your own derives from a class of `parsing.py`, too.
"""

from slime_tool_parsers.parsing import (
    MarkedParser,
    ToolParserBase,
    call_of,
    json_call,
    json_objects,
    named_call,
)
from slime_tool_parsers.values import read_json, typed_value

__all__ = [
    "MarkedParser",
    "ToolParserBase",
    "call_of",
    "json_call",
    "json_objects",
    "named_call",
    "read_json",
    "typed_value",
]
