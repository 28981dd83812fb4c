"""Tool schemas, and functions that are tools."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field
from slime_tool_parsers import Tool, argument_problem, call_problem, check_tools, schema_of

from slime_core.errors import ConfigError
from slime_core.tools import ToolCall


def tool(**parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


@pytest.mark.parametrize(
    ("schemas", "message"),
    [
        ([{"name": "f"}], r"tools\[0\]: .* is no tool; expected"),
        ([{"type": "function"}], "is no tool"),
        ([tool(type="array")], '"type": "object"'),
        ([tool(type="object", properties={"a": {"type": "intt"}})], r"tools\[0\] \(f\): parameters are no JSON schema"),
        ([tool(), tool()], "f defined more than once"),
        ([{"type": "function", "function": {"name": "a b"}}], "name 'a b'; expected"),
    ],
)
def test_schemas_that_are_none(schemas: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_tools(schemas)


SCHEMA = tool(
    type="object",
    properties={"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1}},
    required=["city"],
    additionalProperties=False,
)


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (ToolCall("", "f", {"city": "Oslo", "days": 2}), None),
        (ToolCall("", "g", {}), "no tool named 'g'; tools: f"),
        (ToolCall("", "f", "Oslo"), "arguments of f must be a JSON object"),
        (ToolCall("", "f", {}), "arguments: 'city' is a required property"),
        (ToolCall("", "f", {"city": 1}), "argument city: 1 is not of type 'string'"),
        (ToolCall("", "f", {"city": "a", "days": 0}), "argument days: 0 is less than the minimum of 1"),
        (ToolCall("", "f", {"city": "a", "x": 0}), "Additional properties are not allowed"),
    ],
)
def test_calls_are_checked(call: ToolCall, problem: str | None) -> None:
    found = call_problem(call, [SCHEMA])
    assert found is None if problem is None else problem in str(found)


def test_a_schema_fetches_nothing() -> None:
    with pytest.raises(ConfigError, match="cannot be resolved inside the schema"):
        argument_problem({"a": 1}, {"properties": {"a": {"$ref": "http://127.0.0.1:9/schema.json"}}})


def weather(city: str, days: Annotated[int, Field(ge=1)] = 1, unit: Literal["C", "F"] | None = None) -> str:
    """The weather of a city.

    In words.

    Args:
        city (str): Its name,
            in English.
        days: How many.

    Returns:
        Words.
    """
    return f"{city} {days} {unit}"


def test_a_schema_of_signature_and_docstring() -> None:
    function = schema_of(weather)["function"]
    assert (function["name"], function["description"]) == ("weather", "The weather of a city.\n\nIn words.")
    assert function["parameters"] == {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "Its name, in English."},
            "days": {"type": "integer", "minimum": 1, "default": 1, "description": "How many."},
            "unit": {"anyOf": [{"enum": ["C", "F"], "type": "string"}, {"type": "null"}], "default": None},
        },
        "required": ["city"],
        "additionalProperties": False,
    }


def unannotated(city):  # type: ignore[no-untyped-def]
    return city


def positional(*cities: str) -> str:
    return str(cities)


class Opaque:
    pass


def opaque(thing: Opaque) -> str:
    return str(thing)


def unknown(city: Town) -> str:  # type: ignore[name-defined]  # noqa: F821
    return str(city)


def streamed(city: str) -> Iterator[str]:
    yield city


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (streamed, r"--tools-path 'x' \(streamed\): it yields; a tool returns what the model is to read"),
        (unannotated, "'city' has no annotation"),
        (positional, "passed by name"),
        (opaque, "no JSON schema"),
        (unknown, r"--tools-path 'x' \(unknown\): its signature cannot be read: name 'Town' is not defined; annotate"),
        (max, "its signature cannot be read: no signature found"),
        (3, "int is no function"),
    ],
)
def test_functions_without_a_schema(function: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Tool.of(function, "--tools-path 'x'")


def test_parameters_may_have_names_that_pydantic_uses_itself() -> None:
    def settings(model_config: str, _city: str, json: int = 1) -> str:
        return f"{model_config} {_city} {json}"

    parameters = schema_of(settings)["function"]["parameters"]
    assert list(parameters["properties"]) == ["model_config", "_city", "json"]
    assert parameters["required"] == ["model_config", "_city"]


def test_a_function_may_bring_its_schema_and_take_the_sample() -> None:
    def given(city: str, *, sample: Any, args: Any = None) -> str:
        return f"{city} {sample} {args}"

    found = Tool.of(given)
    assert found.given == {"sample", "args"}
    assert list(found.schema["function"]["parameters"]["properties"]) == ["city"]
    given.schema = SCHEMA  # type: ignore[attr-defined]
    assert Tool.of(given).name == "f"
