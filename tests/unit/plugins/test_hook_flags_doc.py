"""`docs/reference/hooks.md` says what the table of kinds says, and leaves no hook flag out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from slime_core.config.spec import flag_specs
from slime_core.config.support import has_effect
from slime_core.plugins.kinds import KINDS, Call, Kind

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "reference" / "hooks.md"
NOT_HOOKS = {
    "--prepare-path", "--tools-path", "--custom-config-path", "--megatron-config-path", "--environment-path",
    "--eval-answer-path",
}  # fmt: skip
"""Flags that end like one: a recipe and tools (docs/plugins/index.md), and files of settings."""
ROW = re.compile(r"^\| (\d+) \| `(--[a-z-]+)` \| `(\w+)` \| `(.*?)` \| \[(.*?)\]\((.*?)\) \|$", re.MULTILINE)


def rows() -> list[tuple[str, ...]]:
    return ROW.findall(PAGE.read_text(encoding="utf-8"))


def calls(kind: Kind) -> list[Call]:
    return [*kind.calls, *([kind.construct] if kind.construct else [])]


def test_every_numbered_flag_has_a_row() -> None:
    assert [int(row[0]) for row in rows()] == list(range(1, 25))


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[1])
def test_kind_call_and_example_are_those_of_the_table(row: tuple[str, ...]) -> None:
    _, flag, kind, call, label, target = row
    assert flag in KINDS[kind].flags
    assert call.replace("\\|", "|") in [c.shown for c in calls(KINDS[kind])]
    example = (PAGE.parent / target).resolve()
    assert example.is_file()
    assert example.name == label
    text = example.read_text(encoding="utf-8")
    names = KINDS[kind].canonical
    assert any(re.search(rf"(?:def|class) {name}\b", text) for name in names) or flag == "--eval-function-path"


def test_no_hook_flag_is_left_out() -> None:
    documented = {row[1] for row in rows()}
    flags = {spec.flag for spec in flag_specs().values() if spec.flag.endswith("-path") and has_effect(spec.name)}
    assert flags - documented - NOT_HOOKS == set()


def test_the_page_says_what_is_refused() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for spec in flag_specs().values():
        if spec.flag.endswith("-path") and not has_effect(spec.name) and spec.flag not in NOT_HOOKS:
            assert f"`{spec.flag}`" in text
