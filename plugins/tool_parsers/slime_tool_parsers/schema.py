"""Check OpenAI-style tool schemas, and tool calls against the schemas.

`check_tools` reports to users, at the start of a run or in an endpoint. `call_problem` reports to the model, which
reads the one-line message as an observation. A schema must not refer to anything outside of itself; nothing is fetched.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from slime_core.errors import ConfigError
from slime_core.tools import ToolCall, ToolSchema

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_LONGEST_PROBLEM = 300
"""Largest length, in characters, of a validation message for the model."""


def json_text(value: Any) -> str:
    """Return JSON in the form that models are trained on: separators `, ` and `: `, no escapes of non-ASCII letters."""
    return json.dumps(value, ensure_ascii=False)


def check_tools(tools: Sequence[ToolSchema], origin: str = "tools") -> list[dict[str, Any]]:
    """Return the schemas as plain dictionaries with unique names. Raises ConfigError."""
    checked = [check_tool(tool, f"{origin}[{i}]") for i, tool in enumerate(tools)]
    names = [tool["function"]["name"] for tool in checked]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"{origin}: {', '.join(twice)} defined more than once; give each tool a name of its own")
    return checked


def check_tool(tool: ToolSchema, origin: str = "tool") -> dict[str, Any]:
    """Return a checked schema in OpenAI's form. Raises ConfigError if a part is missing or wrong."""
    function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
    if not isinstance(function, Mapping):
        raise ConfigError(
            f"{origin}: {str(tool)[:80]!r} is no tool; expected"
            ' {"type": "function", "function": {"name": ..., "description": ..., "parameters": JSON schema}}'
        )
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(f"{origin}: name {name!r}; expected 1 to 64 letters, digits, '_', '-' or '.'")
    parameters = function.get("parameters", {"type": "object", "properties": {}})
    if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
        raise ConfigError(f'{origin} ({name}): parameters must be a JSON schema of "type": "object"')
    import jsonschema

    try:
        jsonschema.Draft202012Validator.check_schema(dict(parameters))
    except jsonschema.SchemaError as error:
        raise ConfigError(f"{origin} ({name}): parameters are no JSON schema: {error.message}") from error
    return {**tool, "function": {**function, "parameters": dict(parameters)}}


def parameters_of(tools: Sequence[ToolSchema], name: str) -> Mapping[str, Any] | None:
    """Return the parameter schema of the tool called `name`; None without such a tool."""
    for tool in tools:
        function = tool.get("function", {})
        if function.get("name") == name:
            parameters: Mapping[str, Any] = function.get("parameters") or {}
            return parameters
    return None


def call_problem(call: ToolCall, tools: Sequence[ToolSchema]) -> str | None:
    """Return the problem of an invalid call, in one line for the model; None if the call is valid."""
    parameters = parameters_of(tools, call.name)
    if parameters is None:
        known = ", ".join(str(tool["function"]["name"]) for tool in tools) or "none"
        return f"no tool named {call.name!r}; tools: {known}"
    if not isinstance(call.arguments, dict):
        return f"arguments of {call.name} must be a JSON object"
    return argument_problem(call.arguments, parameters)


def argument_problem(arguments: Mapping[str, Any], parameters: Mapping[str, Any]) -> str | None:
    """Return why the arguments do not fit the schema, in one line; None if they fit."""
    from jsonschema.exceptions import best_match
    from referencing.exceptions import Unresolvable

    try:
        error = best_match(_validator(json.dumps(parameters, sort_keys=True)).iter_errors(dict(arguments)))
    except Unresolvable as problem:
        raise ConfigError(f"tool schema: {problem} cannot be resolved inside the schema") from problem
    if error is None:
        return None
    where = ".".join(str(part) for part in error.absolute_path)
    text = f"argument {where}: {error.message}" if where else f"arguments: {error.message}"
    return text if len(text) <= _LONGEST_PROBLEM else text[:_LONGEST_PROBLEM] + "..."


@lru_cache(maxsize=256)
def _validator(schema: str) -> Any:
    import jsonschema
    from referencing import Registry

    return jsonschema.Draft202012Validator(json.loads(schema), registry=Registry())
