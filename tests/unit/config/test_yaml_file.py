from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from slime_core.config.yaml_file import dump_value, read_scalar, read_yaml

_LEAF = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
_KEY = st.text() | st.booleans() | st.integers() | st.floats(allow_nan=False)
_VALUE = st.recursive(_LEAF, lambda v: st.lists(v, max_size=3) | st.dictionaries(_KEY, v, max_size=3), max_leaves=6)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("-.5", -0.5),
        ("3", 3),
        ("010", 10),
        ("1:30", "1:30"),
        ("no", "no"),
        ("on", "on"),
        ("true", True),
        ("~", None),
        ("", None),
        ("2024-01-01", "2024-01-01"),
        (".inf", math.inf),
    ],
)
def test_scalars_follow_the_core_schema(text: str, value: Any) -> None:
    got = read_scalar(text)
    assert got == value
    assert type(got) is type(value)


@settings(max_examples=12)
@given(_VALUE)
@example({1: "a", 0.5: {True: "b"}})
def test_dumped_values_read_back(value: Any) -> None:
    text = dump_value(value)
    assert "\n" not in text
    assert read_scalar(f"{{k: {text}}}")["k"] == value


def test_items_know_their_lines(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("# comment\na: 1\n\nb:\n  - x\n  - y\nc: 2\n")
    assert {k: (i.value, i.where.rsplit(":", 1)[1]) for k, i in read_yaml(file).items()} == {
        "a": (1, "2"),
        "b": (["x", "y"], "4"),
        "c": (2, "7"),
    }
    file.write_text("")
    assert read_yaml(file) == {}
