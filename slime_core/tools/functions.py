"""A Python function -> a tool: its schema, and how it is called.

`data/tools.py` makes the tools of `--tools-path` here. A schema is the function's attribute `schema` when it has one,
else made from its signature, its annotations and the `Args:` of its docstring. The keyword-only parameters `args` and
`sample` are given by slime; the model neither sees nor sets them.
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from slime_core.errors import ConfigError, name_of
from slime_core.tools.schema import check_tool

GIVEN = ("args", "sample")
"""Keyword-only parameters that are no part of the schema."""

_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns|Raises|Yields|Example|Examples):\s*$")
_ARGUMENT = re.compile(r"^\*{0,2}(\w+)(?:\s*\([^)]*\))?:\s*(.*)$")


@dataclass(frozen=True)
class Tool:
    """Something a model may call."""

    schema: dict[str, Any]
    """OpenAI's form."""
    function: Callable[..., Any]
    """Called with the arguments by name; may be a coroutine function. What it returns is shown as text, or as JSON
    when it is no text."""
    given: frozenset[str] = frozenset()
    """Those of `GIVEN` that it takes."""

    @property
    def name(self) -> str:
        """What the model calls it by."""
        return str(self.schema["function"]["name"])

    @classmethod
    def of(cls, function: Any, origin: str = "tool") -> Tool:
        """The tool that a function is. Raises ConfigError when it has no schema and none can be made."""
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
    """OpenAI's form of a function: names and types of its signature, words of its docstring.

    Raises:
        ConfigError: A parameter has no annotation or one without a JSON schema, or is not passed by name; or there is
            no signature to read, or an annotation names what its module does not know.
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
    """The function, or what calling an object of a class calls."""
    called: Callable[..., Any] = function if inspect.isroutine(function) else type(function).__call__
    return called


def _given(function: Callable[..., Any]) -> list[str]:
    parameters = inspect.signature(function).parameters
    return [name for name in GIVEN if name in parameters and parameters[name].kind is inspect.Parameter.KEYWORD_ONLY]


def _docstring(text: str) -> tuple[str, dict[str, str]]:
    """(what stands before the first section, parameter -> description) of a docstring with an `Args:` section."""
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
    """A schema without pydantic's generated titles, which models need not read."""
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
