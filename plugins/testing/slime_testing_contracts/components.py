"""Test suites for pytest to collect: one class for each component that `--slime-component` names."""

from __future__ import annotations

import re
from typing import Any

import pytest

from slime_core.errors import SlimeError
from slime_core.plugins.kinds import HOOK_GROUP
from slime_testing_contracts.base import Contract, suite_of
from slime_testing_contracts.pytest_plugin import Requested, requested


def _classes() -> dict[str, type]:
    found = {}
    for number, component in enumerate(requested(), start=1):
        kind = "hooks" if component.kind == HOOK_GROUP else component.kind
        words = re.sub(r"\W+", "_", component.spec.rpartition("/")[2]).strip("_")
        name = f"Test{number}_{kind}_{words}"
        found[name] = _suite(name, component, suite_of(component.kind))
    return found


def _suite(name: str, component: Requested, suite: type[Contract]) -> type:
    facts: dict[str, Any] = {"__module__": __name__, "__doc__": suite.__doc__, "kind": component.kind}
    made = type(name, (suite,), {**facts, "component": component.spec, "args": component.settings})
    try:
        made().load()
    except SlimeError as error:
        return type(name, (), {**facts, "test_it_loads": _failing(str(error))})
    return made


def _failing(message: str) -> Any:
    """Return a single failing test with the message, instead of a suite in which every test fails with it."""

    def test_it_loads(self: Any) -> None:
        pytest.fail(message, pytrace=False)

    return test_it_loads


globals().update(_classes())
