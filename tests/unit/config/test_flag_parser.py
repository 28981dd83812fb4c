"""argparse over another program's flags: what YAML and variables mean, and what would be typed for a value."""

from __future__ import annotations

from argparse import BooleanOptionalAction
from typing import Any

import pytest

from slime_core.config import FlagParser
from slime_core.config.flag_parser import OneOrMore, Switch, as_json, words
from slime_core.errors import ConfigError
from tests.sweeps import sweep


def flag(**shape: Any) -> FlagParser:
    parser = FlagParser("Mine 2.0")
    parser.add_argument("--x", **shape)
    return parser


LIST = {"type": int, "nargs": "+"}
EITHER = {"type": float, "nargs": "+", "action": OneOrMore}


@pytest.mark.parametrize(
    ("shape", "raw", "message"),
    [
        ({"type": int}, "1.5", "invalid int value: '1.5'"),
        ({"type": int}, 1.5, "invalid int value: '1.5'"),
        ({"type": int}, [1], "expected one value, not a list"),
        ({"type": float}, "x", "invalid float value: 'x'"),
        ({"type": int}, True, "expected a value, not true or false"),
        ({"action": "store_true"}, 1, "expected true or false"),
        ({"action": Switch, "off": ["--no-x"]}, "maybe", "expected true or false"),
        ({}, True, "expected a value, not true or false"),
        ({}, ["a"], "expected one value, not a list"),
        ({"type": as_json}, "{", "'{' is not valid JSON: "),
        ({"type": int, "choices": (0, 1)}, "3", "invalid choice: 3 (choose from 0, 1)"),
        (LIST, [], "expected at least one argument"),
        ({"nargs": 2}, ["a"], "expected 2 arguments"),
        ({"nargs": "+"}, "[1", "Expecting ',' delimiter"),
        ({"nargs": "+", "choices": ("a", "b")}, ["a", "c"], "invalid choice: 'c' (choose from 'a', 'b')"),
    ],
)
def test_what_does_not_fit_is_said_with_its_place(shape: dict[str, Any], raw: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        flag(**shape).read("x", raw, "run.yaml:3: x")
    assert str(caught.value).startswith(f"run.yaml:3: x {raw!r}: {message}")


@sweep(
    "shape, raw, value",
    [
        ({"type": int}, "-1", -1),
        ({"type": int}, 2.0, 2),
        ({"type": float}, 1, 1.0),
        ({"type": float}, -1e-5, -1e-5),
        ({}, 7, "7"),
        ({}, "-odd", "-odd"),
        ({}, {"a": 1}, '{"a":1}'),
        ({"type": as_json}, '{"a": [1]}', {"a": [1]}),
        ({"type": as_json}, [1], [1]),
        ({"action": "store_true"}, "true", True),
        ({"action": BooleanOptionalAction}, False, False),
        ({"type": int}, None, None),
        ({"action": "store_true"}, None, None),
        (LIST, [1, "2"], [1, 2]),
        (LIST, "1 2", [1, 2]),
        (LIST, "[1, 2]", [1, 2]),
        (LIST, 1, [1]),
        (EITHER, "1", 1.0),
        (EITHER, [1], [1.0]),
        (EITHER, [1, 2], [1.0, 2.0]),
        ({"nargs": "?", "const": ""}, True, ""),
        ({"nargs": "?", "const": ""}, "f", "f"),
        ({"nargs": "*"}, [], []),
    ],
)
def test_values_of_files_and_variables(shape: dict[str, Any], raw: Any, value: Any) -> None:
    name, found = flag(**shape).read("x", raw, "run.yaml:3: x")
    assert (name, found, type(found)) == ("x", value, type(value))


@pytest.mark.parametrize("shape", [{"action": BooleanOptionalAction}, {"action": Switch, "off": ["--no-x"]}])
def test_a_name_that_turns_off(shape: dict[str, Any]) -> None:
    assert flag(**shape).read("no_x", True, "") == ("x", False)
    assert flag(**shape).read("no_x", "false", "") == ("x", True)
    assert words(flag(**shape).by_name["x"], False) == ["--no-x"]


def test_what_cannot_be_said() -> None:
    with pytest.raises(ValueError, match="can only be set to true"):
        words(flag(action="store_true").by_name["x"], False)
    with pytest.raises(ConfigError, match=r"^run.yaml:3: y: Mine 2.0 has no such flag.$"):
        flag().read("y", 1, "run.yaml:3: y")
