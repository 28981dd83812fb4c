"""Text of one value in a call -> a JSON value.

Every parser reads its values here, so that NaN, Infinity and numbers beyond the range of a float are refused in every
form: JSON has none of them, and a client could not read the call.
"""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Mapping
from typing import Any


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


def _finite(digits: str) -> float:
    number = float(digits)
    return number if math.isfinite(number) else _refuse(digits)


DECODER = json.JSONDecoder(parse_constant=_refuse, parse_float=_finite)
"""Decoder of strict JSON."""
_LENIENT = json.JSONDecoder(strict=False)
_WORDS: Mapping[str, Any] = {"true": True, "false": False, "null": None, "none": None}


def read_json(text: str) -> Any:
    """Return the JSON value. Raise ValueError for other text, for NaN, and for nesting that is too deep."""
    try:
        return DECODER.decode(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def json_end(text: str, start: int) -> int:
    """Return the place after the JSON value at `start`, or `start` if no JSON value is there.

    NaN and raw line breaks in strings are accepted, because only the end of the value matters.
    """
    try:
        return _LENIENT.raw_decode(text, start)[1]
    except (ValueError, RecursionError):
        return start


def read_python(text: str) -> Any:
    """Return the JSON value of a Python literal. Raise ValueError if the text is not a literal."""
    try:
        return literal(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, TypeError, RecursionError, MemoryError) as error:
        raise ValueError(str(error)) from None


def literal(node: ast.expr) -> Any:
    """Return the JSON value of a literal's syntax tree; `true`, `false` and `null` in any case stand for Python's.

    Raises:
        ValueError: The tree is not a literal, or JSON has no such value.
    """
    if isinstance(node, ast.Name) and node.id.lower() in _WORDS:
        return _WORDS[node.id.lower()]
    if isinstance(node, (ast.List, ast.Tuple)):
        return [literal(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        if not all(isinstance(key, ast.Constant) and isinstance(key.value, str) for key in node.keys):
            raise ValueError("keys of a mapping are text")
        return {ast.literal_eval(key): literal(value) for key, value in zip(node.keys, node.values) if key}
    value = ast.literal_eval(node)
    if not isinstance(value, (str, int, float, type(None))):
        raise ValueError(f"{type(value).__name__} is no JSON")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} is no JSON")
    return value


def typed_value(text: str, schema: Mapping[str, Any] | None) -> Any:
    """Return a value that stood in the text without quotes, as its schema types it.

    Text stays text if the schema allows a string and the text is no JSON value of another allowed type. If the schema
    allows no string, Python's spelling is read, too (`True`, `['a']`, `{'b': None}`). Without a schema the value is
    JSON if it reads as JSON, else text.
    """
    types = _types(schema)
    try:
        value = read_json(text)
    except ValueError:
        if types is None or "string" in types:
            return text
        try:
            value = read_python(text)
        except ValueError:
            return text
    if types is None or _is_of(value, types - {"string"}):
        return value
    return text if "string" in types else value


def _types(schema: Mapping[str, Any] | None) -> set[str] | None:
    """Return the JSON types that a schema allows; None if it names none."""
    if not schema:
        return None
    if "type" in schema:
        declared = schema["type"]
        return {declared} if isinstance(declared, str) else set(declared)
    if "enum" in schema or "const" in schema:
        return {_type_name(value) for value in schema.get("enum", [schema.get("const")])}
    branches = [_types(branch) for key in ("anyOf", "oneOf") for branch in schema.get(key, ())]
    known = [types for types in branches if types is not None]
    return set().union(*known) if known and len(known) == len(branches) else None


def _type_name(value: Any) -> str:
    names = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
    return names.get(type(value), "null")


def _is_of(value: Any, types: set[str]) -> bool:
    name = _type_name(value)
    return name in types or (name == "integer" and "number" in types)
