"""Make tools from Python functions: their schemas, and how to call them.

`data/tools.py` makes the tools of `--tools-path` here. The schema is the function's attribute `schema` if it has one,
else it is made from the signature, the annotations and the `Args:` of the docstring. slime sets the keyword-only
parameters `args` and `sample`; the model neither sees nor sets them.
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from slime_core.errors import ConfigError, name_of
from slime_tool_parsers.schema import check_tool

GIVEN = ("args", "sample")
"""Keyword-only parameters that are not part of the schema."""

_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns|Raises|Yields|Example|Examples):\s*$")
_ARGUMENT = re.compile(r"^\*{0,2}(\w+)(?:\s*\([^)]*\))?:\s*(.*)$")


@dataclass(frozen=True)
class Tool:
    """A function that a model may call."""

    schema: dict[str, Any]
    """Schema in OpenAI's form."""
    function: Callable[..., Any]
    """Function that is called with the arguments by name; may be a coroutine function. Its result is shown as text, or
    as JSON if it is not a string."""
    given: frozenset[str] = frozenset()
    """Names of `GIVEN` that the function takes as parameters."""

    @property
    def name(self) -> str:
        """Return the name under which the model calls the tool."""
        return str(self.schema["function"]["name"])

    @classmethod
    def of(cls, function: Any, origin: str = "tool") -> Tool:
        """Make a tool of a function. Raises ConfigError if it has no schema and none can be derived."""
        if isinstance(function, Tool):
            return function
        if not callable(function):
            raise ConfigError(f"{origin}: {type(function).__name__} is no function; a tool is one, or a list of them")
        called = _called(function)
        if inspect.isgeneratorfunction(called) or inspect.isasyncgenfunction(called):
            name = name_of(function)
            raise ConfigError(f"{origin} ({name}): it yields; a tool returns what the model is to read")
        declared = getattr(function, "schema", None)
        schema = check_tool(declared, origin) if isinstance(declared, Mapping) else schema_of(function, origin)
        return cls(schema, function, frozenset(_given(function)))


def schema_of(function: Callable[..., Any], origin: str = "tool") -> dict[str, Any]:
    """Return a function's schema in OpenAI's form: names and types from its signature, text from its docstring.

    Raises:
        ConfigError: A parameter has no annotation, an annotation without a JSON schema, or cannot be passed by name; or
            the signature cannot be read, or an annotation has a name that its module does not define.
    """
    from pydantic import ConfigDict, Field, create_model
    from pydantic.errors import PydanticSchemaGenerationError, PydanticUserError

    name = name_of(function)
    summary, described = _docstring(inspect.getdoc(function) or "")
    try:
        hints = typing.get_type_hints(_called(function), include_extras=True)
        parameters = inspect.signature(function).parameters.values()
    except (AttributeError, NameError, SyntaxError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{origin} ({name}): its signature cannot be read: {error}; annotate each parameter with a type that its"
            " module knows, or give the function an attribute `schema`"
        ) from error
    fields: dict[str, Any] = {}
    for parameter in parameters:
        if parameter.name in _given(function):
            continue
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ConfigError(f"{origin} ({name}): parameter {parameter}: a tool's arguments are passed by name")
        if parameter.name not in hints:
            raise ConfigError(f"{origin} ({name}): parameter {parameter.name!r} has no annotation to make a schema of")
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[f"argument_{len(fields)}"] = (  # no name of pydantic's own, as `model_config` and `_city` would be
            hints[parameter.name],
            Field(default, alias=parameter.name, description=described.get(parameter.name)),
        )
    try:
        model = create_model(name, __config__=ConfigDict(extra="forbid", arbitrary_types_allowed=False), **fields)
        schema = _without_titles(model.model_json_schema())
    except (PydanticSchemaGenerationError, PydanticUserError) as error:
        raise ConfigError(f"{origin} ({name}): no JSON schema: {str(error).splitlines()[0]}") from error
    schema.pop("description", None)
    function_schema = {"name": name, "description": summary, "parameters": {"properties": {}, **schema}}
    return check_tool({"type": "function", "function": function_schema}, origin)


def _called(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, or the `__call__` of an object."""
    called: Callable[..., Any] = function if inspect.isroutine(function) else type(function).__call__
    return called


def _given(function: Callable[..., Any]) -> list[str]:
    parameters = inspect.signature(function).parameters
    return [name for name in GIVEN if name in parameters and parameters[name].kind is inspect.Parameter.KEYWORD_ONLY]


def _docstring(text: str) -> tuple[str, dict[str, str]]:
    """Split a docstring into (text before the first section, parameter -> description from `Args:`)."""
    section, current = "", ""
    summary: list[str] = []
    described: dict[str, str] = {}
    indent = 0
    for line in text.splitlines():
        heading = _SECTION.match(line)
        if heading:
            section, current, indent = heading[1], "", 0
        elif not section:
            summary.append(line)
        elif section in ("Args", "Arguments", "Parameters") and line.strip():
            depth = len(line) - len(line.lstrip())
            indent = indent or depth
            entry = _ARGUMENT.match(line.strip())
            if entry and depth == indent:
                current, described[entry[1]] = entry[1], entry[2]
            elif current:
                described[current] += " " + line.strip()
    return "\n".join(summary).strip(), described


def _without_titles(schema: Any) -> Any:
    """Return a schema without pydantic's generated titles, which models do not need."""
    if isinstance(schema, list):
        return [_without_titles(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: {name: _without_titles(value) for name, value in item.items()}
        if key in ("properties", "$defs")
        else _without_titles(item)
        for key, item in schema.items()
        if not (key == "title" and isinstance(item, str))
    }
