"""OpenAI-style tool schemas: checked once, and calls checked against them.

`check_tools` is for users, at the start of a run or the door of an endpoint; `call_problem` is for the model, which
reads its one-line answer as an observation. A schema may not point outside of itself; nothing is fetched.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from slime_core.errors import ConfigError
from slime_core.tools.calls import ToolCall, ToolSchema

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_LONGEST_PROBLEM = 300
"""Characters of a validation message that the model is shown."""


def json_text(value: Any) -> str:
    """JSON as models are trained on it: `, ` and `: ` between, no escapes of letters outside ASCII."""
    return json.dumps(value, ensure_ascii=False)


def check_tools(tools: Sequence[ToolSchema], origin: str = "tools") -> list[dict[str, Any]]:
    """The schemas as plain dictionaries, names unique. Raises ConfigError."""
    checked = [check_tool(tool, f"{origin}[{i}]") for i, tool in enumerate(tools)]
    names = [tool["function"]["name"] for tool in checked]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"{origin}: {', '.join(twice)} defined more than once; give each tool a name of its own")
    return checked


def check_tool(tool: ToolSchema, origin: str = "tool") -> dict[str, Any]:
    """One schema in OpenAI's form. Raises ConfigError that says what is missing."""
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
    """The parameters' schema of the tool of that name; None when there is none."""
    for tool in tools:
        function = tool.get("function", {})
        if function.get("name") == name:
            parameters: Mapping[str, Any] = function.get("parameters") or {}
            return parameters
    return None


def call_problem(call: ToolCall, tools: Sequence[ToolSchema]) -> str | None:
    """Why the call cannot be made, in one line for the model; None when it can."""
    parameters = parameters_of(tools, call.name)
    if parameters is None:
        known = ", ".join(str(tool["function"]["name"]) for tool in tools) or "none"
        return f"no tool named {call.name!r}; tools: {known}"
    if not isinstance(call.arguments, dict):
        return f"arguments of {call.name} must be a JSON object"
    return argument_problem(call.arguments, parameters)


def argument_problem(arguments: Mapping[str, Any], parameters: Mapping[str, Any]) -> str | None:
    """Why the arguments do not fit the schema, in one line; None when they do."""
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
