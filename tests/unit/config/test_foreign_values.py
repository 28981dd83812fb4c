from __future__ import annotations

from typing import Any

import pytest

from slime_core.config import ForeignFlag
from slime_core.config.foreign_values import convert, convert_words


@pytest.mark.parametrize(
    ("kind", "raw", "message"),
    [
        ("int", "1.5", "expected a whole number"),
        ("int", 1.5, "expected a whole number"),
        ("int", [1], "expected a whole number"),
        ("float", "x", "expected a number"),
        ("int", True, "expected a number"),
        ("switch", 1, "expected true or false"),
        ("toggle", "maybe", "expected true or false"),
        ("size", "1.5Ki", "expected a whole number, such as 32768 or 32k"),
        ("size", "1K", "expected a whole number, such as 32768 or 32k"),
        ("str", True, "expected text"),
        ("str", ["a"], "expected text"),
    ],
)
def test_convert_says_what_is_expected(kind: Any, raw: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        convert(ForeignFlag("x", kind), raw)


@pytest.mark.parametrize(
    ("kind", "raw", "value"),
    [
        ("int", "-1", -1),
        ("int", 2.0, 2),
        ("float", 1, 1.0),
        ("size", "25.6k", 25600),
        ("size", "16Ki", 16384),
        ("size", 512, 512),
        ("str", 7, "7"),
        ("str", {"a": 1}, '{"a": 1}'),
        ("json", '{"a": [1]}', {"a": [1]}),
        ("json", [1], [1]),
        ("switch", "true", True),
        ("toggle", False, False),
        ("int", None, None),
    ],
)
def test_values_of_files_and_variables(kind: Any, raw: Any, value: Any) -> None:
    found = convert(ForeignFlag("x", kind), raw)
    assert (found, type(found)) == (value, type(value))


def test_bad_json_says_where() -> None:
    with pytest.raises(ValueError, match=r"^not valid JSON: .*column 2"):
        convert(ForeignFlag("x", "json"), "{")


def test_choices_are_those_of_the_type() -> None:
    level = ForeignFlag("x", "int", choices=(0, 1, 2))
    assert convert(level, "2") == 2
    with pytest.raises(ValueError, match=r"^must be one of 0, 1, 2$"):
        convert(level, "3")
    names = ForeignFlag("x", "str", is_list=True, choices=("a", "b"))
    with pytest.raises(ValueError, match=r"^must be one of a, b$"):
        convert_words(names, ["a", "c"])


@pytest.mark.parametrize(
    ("flag", "words", "value"),
    [
        (ForeignFlag("x", "switch"), [], True),
        (ForeignFlag("x", "int", is_list=True), ["1", "2"], [1, 2]),
        (ForeignFlag("x", "str", is_list=True, may_be_empty=True), [], []),
        (ForeignFlag("x", "str", may_be_empty=True, const=""), [], ""),
        (ForeignFlag("x", "str", may_be_empty=True, const=""), ["f"], "f"),
    ],
)
def test_numbers_of_words(flag: ForeignFlag, words: list[str], value: Any) -> None:
    assert convert_words(flag, words) == value


@pytest.mark.parametrize(
    ("flag", "words", "message"),
    [
        (ForeignFlag("x", "switch"), ["true"], "takes no value"),
        (ForeignFlag("x", "int"), [], "expected a value"),
        (ForeignFlag("x", "int"), ["1", "2"], "expected one value, not 2"),
        (ForeignFlag("x", "int", is_list=True), [], "expected at least one value"),
        (ForeignFlag("x", "int", is_list=True, count=2), ["1"], "expected 2 values"),
    ],
)
def test_wrong_numbers_of_words(flag: ForeignFlag, words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        convert_words(flag, words)


def test_lists_in_files_and_variables() -> None:
    sizes = ForeignFlag("x", "int", is_list=True)
    assert convert(sizes, [1, "2"]) == convert(sizes, "1 2") == convert(sizes, "[1, 2]") == [1, 2]
    assert convert(sizes, 1) == [1]
    optional = ForeignFlag("x", "str", may_be_empty=True, const="")
    assert convert(optional, True) == ""
