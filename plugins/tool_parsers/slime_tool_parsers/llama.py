"""Llama's two forms: JSON objects separated by `;` (Llama 3.1 and later), and a Python list of calls (pythonic).

Neither form has an end mark, so the calls are the rest of the turn.
"""

from __future__ import annotations

import ast
import contextlib
import io
import itertools
import keyword
import re
import tokenize
from collections.abc import Sequence
from typing import ClassVar

from slime_core.tools import IllFormedCall, ToolCall, ToolSchema
from slime_tool_parsers.parsing import Attempt, ToolParserBase, call_of, json_objects, tool_names
from slime_tool_parsers.schema import json_text
from slime_tool_parsers.values import DECODER, literal

_NAME = re.compile(r'"name"\s*:\s*"([^"]*)"')
_PARAMETERS = re.compile(r'"(?:parameters|arguments)"\s*:')
_KEYWORD = "__is_no_keyword"
_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|end_of_text|>")


class Llama3(ToolParserBase):
    """`{"name": ..., "parameters": {...}}`, with or without `<|python_tag|>` before it."""

    ends: ClassVar[tuple[str, ...]] = _ENDS
    tag: ClassVar[str] = "<|python_tag|>"

    def read(self, text: str, tools: Sequence[ToolSchema]) -> tuple[str, list[Attempt]]:
        """Read the objects after the tag; without a tag, the turn must begin with an object that is a call."""
        content, body = "", text
        if not self._begins_with_call(text, tools):
            content, tagged, body = text.partition(self.tag)
            if not tagged:
                return text, []
        attempts: list[Attempt] = []
        try:
            for value, raw in json_objects(body):
                attempts.append(call_of(value, raw, "parameters", "arguments"))
        except ValueError as error:
            attempts.append(IllFormedCall(str(error.args[1]), str(error.args[0])))
        return content, attempts or [IllFormedCall(body, f"nothing follows {self.tag}")]

    def _begins_with_call(self, text: str, tools: Sequence[ToolSchema]) -> bool:
        """Return True for an object with a name that is a tool's, or with a name and parameters.

        Other objects are answers, such as `{"name": "Bob", "age": 3}`. If an object is invalid JSON or truncated, the
        existing part decides.
        """
        start = text.lstrip()
        if not start.startswith("{"):
            return False
        try:
            value = DECODER.raw_decode(start)[0]
        except (ValueError, RecursionError):
            name = _NAME.search(start)
            return name is not None and (name[1] in tool_names(tools) or bool(_PARAMETERS.search(start)))
        name = value.get("name")
        return isinstance(name, str) and (name in tool_names(tools) or "parameters" in value or "arguments" in value)

    def render(self, calls: Sequence[ToolCall]) -> str:
        """Write the calls in the form that SGLang and vLLM expect; the published templates write a single call."""
        return "; ".join(json_text({"name": call.name, "parameters": call.arguments}) for call in calls)

    def claims(self, chat_template: str) -> bool:
        """Return True for a template with Llama's header and the JSON form in its instructions."""
        return "<|start_header_id|>" in chat_template and '"parameters"' in chat_template


class Pythonic(ToolParserBase):
    """`[first(city="Oslo"), second(days=3)]`: keyword arguments, and literals as values."""

    ends: ClassVar[tuple[str, ...]] = _ENDS

    _list = re.compile(r"(?:(?:\A|\n)[ \t]*|<\|python_start\|>\s*)(\[\s*[A-Za-z_][\w.]*\s*\(.*)\Z", re.DOTALL)

    def read(self, text: str, tools: Sequence[ToolSchema]) -> tuple[str, list[Attempt]]:
        """Read a list of calls at the end of the turn, which begins on a new line or after its token."""
        match = self._list.search(text)
        content = (text if match is None else text[: match.start()]).replace("<|python_start|>", "")
        if match is None:
            return content.replace("<|python_end|>", ""), []
        body = match[1].strip().removesuffix("<|python_end|>").rstrip()
        try:
            tree = ast.parse(_without_keywords(body), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            return content, [IllFormedCall(body, f"no Python list of calls: {_reason(error)}")]
        if not isinstance(tree, ast.List):
            return content, [IllFormedCall(body, "no Python list of calls")]
        return content, [self._call(node, body) for node in tree.elts]

    def cut_in_argument(self, body: str) -> bool:
        """Return True if a string literal is not terminated."""
        try:
            ast.parse(body, mode="eval")
        except SyntaxError as error:
            return error.msg.startswith("unterminated")
        except (ValueError, RecursionError, MemoryError):
            pass
        return False

    def _call(self, node: ast.expr, body: str) -> ToolCall | IllFormedCall:
        name = _dotted(node.func) if isinstance(node, ast.Call) else ""
        if not isinstance(node, ast.Call) or not name:
            return IllFormedCall(body, "an element of the list is no call of a name")
        if node.args or any(keyword.arg is None for keyword in node.keywords):
            return IllFormedCall(body, "arguments are given by name", name)
        try:
            arguments = {str(word.arg).removesuffix(_KEYWORD): literal(word.value) for word in node.keywords}
        except (ValueError, TypeError, RecursionError, MemoryError) as error:
            return IllFormedCall(body, f"a value is no literal: {_reason(error)}", name)
        return ToolCall("", name, arguments)

    def render(self, calls: Sequence[ToolCall]) -> str:
        """Write the calls as a Python list, with values as Python literals."""
        return "[" + ", ".join(self._written(call) for call in calls) + "]"

    def _written(self, call: ToolCall) -> str:
        if isinstance(call.arguments, str):
            raise ValueError(f"call of {call.name}: arguments are given by name; got text")
        if odd := [key for key in call.arguments if not key.isidentifier()]:
            raise ValueError(f"call of {call.name}: argument {odd[0]!r} is no name in Python")
        return f"{call.name}({', '.join(f'{key}={value!r}' for key, value in call.arguments.items())})"

    def claims(self, chat_template: str) -> bool:
        """Return True for a template with the instructions of the pythonic form."""
        return "(params_name1=" in chat_template


def _without_keywords(body: str) -> str:
    """Return the list with a mark on arguments named like keywords (`from="Oslo"`), so that Python parses it."""
    lines = body.split("\n")
    tokens: list[tokenize.TokenInfo] = []
    with contextlib.suppress(tokenize.TokenError, SyntaxError):
        tokens.extend(tokenize.generate_tokens(io.StringIO(body).readline))
    for name, equals in reversed(list(itertools.pairwise(tokens))):
        if name.type == tokenize.NAME and keyword.iskeyword(name.string) and equals.string == "=":
            row, column = name.end
            lines[row - 1] = lines[row - 1][:column] + _KEYWORD + lines[row - 1][column:]
    return "\n".join(lines)


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (before := _dotted(node.value)):
        return f"{before}.{node.attr}"
    return ""


def _reason(error: BaseException) -> str:
    return error.msg if isinstance(error, SyntaxError) else str(error) or type(error).__name__
