"""Llama's two forms: JSON objects, told apart by `;` (Llama 3.1 and later), and a Python list of calls (pythonic).

Nothing marks the end of either, so the calls are the rest of the turn.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from slime_core.tools import IllFormedCall, ToolCall, ToolSchema, json_text
from slime_tool_parser_families.parsing import ToolParserBase, call_of, json_objects

_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|end_of_text|>")


class Llama3(ToolParserBase):
    """`{"name": ..., "parameters": {...}}`, with or without `<|python_tag|>` before it."""

    ends: ClassVar[tuple[str, ...]] = _ENDS
    tag: ClassVar[str] = "<|python_tag|>"

    def read(self, text: str, tools: Sequence[ToolSchema]) -> tuple[str, list[ToolCall | IllFormedCall]]:
        """Without the tag, only a turn that begins with an object which has a name is a call."""
        content, tagged, body = text.partition(self.tag)
        if not tagged:
            if not re.match(r'\s*\{\s*"(?:name|type)"\s*:', text):
                return text, []
            content, body = "", text
        attempts: list[ToolCall | IllFormedCall] = []
        try:
            for value, raw in json_objects(body):
                attempts.append(call_of(value, raw, "parameters", "arguments"))
        except ValueError as error:
            attempts.append(IllFormedCall(str(error.args[1]), str(error.args[0])))
        return content, attempts or [IllFormedCall(body, f"nothing follows {self.tag}")]

    def render(self, calls: Sequence[ToolCall]) -> str:
        """As SGLang and vLLM ask for several calls; the published templates write one."""
        return "; ".join(json_text({"name": call.name, "parameters": call.arguments}) for call in calls)

    def claims(self, chat_template: str) -> bool:
        """Llama's header with the JSON form in its instructions."""
        return "<|start_header_id|>" in chat_template and '"parameters"' in chat_template


class Pythonic(ToolParserBase):
    """`[first(city="Oslo"), second(days=3)]`: keyword arguments, and literals as values."""

    ends: ClassVar[tuple[str, ...]] = _ENDS

    _list = re.compile(r"(?:\A|\n)[ \t]*(\[\s*[A-Za-z_][\w.]*\s*\(.*)\Z", re.DOTALL)
    _constants: ClassVar[Mapping[str, Any]] = {"true": True, "false": False, "null": None}

    def read(self, text: str, tools: Sequence[ToolSchema]) -> tuple[str, list[ToolCall | IllFormedCall]]:
        """A list of calls at the end of the turn, beginning on a line of its own."""
        text = text.replace("<|python_start|>", "").replace("<|python_end|>", "")
        match = self._list.search(text)
        if match is None:
            return text, []
        body = match[1].strip()
        try:
            tree = ast.parse(body, mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            return text[: match.start()], [IllFormedCall(body, f"no Python list of calls: {_reason(error)}")]
        if not isinstance(tree, ast.List):
            return text[: match.start()], [IllFormedCall(body, "no Python list of calls")]
        return text[: match.start()], [self._call(node, body) for node in tree.elts]

    def _call(self, node: ast.expr, body: str) -> ToolCall | IllFormedCall:
        name = _dotted(node.func) if isinstance(node, ast.Call) else ""
        if not isinstance(node, ast.Call) or not name:
            return IllFormedCall(body, "an element of the list is no call of a name")
        if node.args or any(keyword.arg is None for keyword in node.keywords):
            return IllFormedCall(body, "arguments are given by name", name)
        try:
            arguments = {str(keyword.arg): self._value(keyword.value) for keyword in node.keywords}
        except (ValueError, TypeError, RecursionError, MemoryError) as error:
            return IllFormedCall(body, f"a value is no literal: {_reason(error)}", name)
        return ToolCall("", name, arguments)

    def _value(self, node: ast.expr) -> Any:
        """A literal that JSON has too; `true`, `false` and `null` stand for Python's."""
        if isinstance(node, ast.Name) and node.id in self._constants:
            return self._constants[node.id]
        if isinstance(node, (ast.List, ast.Tuple)):
            return [self._value(item) for item in node.elts]
        if isinstance(node, ast.Dict):
            if not all(isinstance(key, ast.Constant) and isinstance(key.value, str) for key in node.keys):
                raise ValueError("keys of a mapping are text")
            return {ast.literal_eval(key): self._value(value) for key, value in zip(node.keys, node.values) if key}
        value = ast.literal_eval(node)
        if not isinstance(value, (str, int, float, bool, type(None))):
            raise ValueError(f"{type(value).__name__} is no JSON")
        return value

    def render(self, calls: Sequence[ToolCall]) -> str:
        """Python's own spelling of the values."""
        return "[" + ", ".join(self._written(call) for call in calls) + "]"

    def _written(self, call: ToolCall) -> str:
        if isinstance(call.arguments, str):
            raise ValueError(f"call of {call.name}: arguments are given by name; got text")
        return f"{call.name}({', '.join(f'{key}={value!r}' for key, value in call.arguments.items())})"

    def claims(self, chat_template: str) -> bool:
        """The instructions of the pythonic form."""
        return "(params_name1=" in chat_template


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (before := _dotted(node.value)):
        return f"{before}.{node.attr}"
    return ""


def _reason(error: BaseException) -> str:
    return error.msg if isinstance(error, SyntaxError) else str(error) or type(error).__name__
