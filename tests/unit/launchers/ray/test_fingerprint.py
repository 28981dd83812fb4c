"""Other code on a node is one error that names node, actor and difference."""

from __future__ import annotations

from typing import Any

import pytest
from slime_launcher_ray.fingerprint import check_same_code, fingerprint

from slime_core.errors import ConfigError


def _plugin(**changes: Any) -> dict[str, Any]:
    return {"kind": "rewards", "name": "math", "distribution": "mine", "version": "1.0", "sha256": "a" * 64} | changes


def test_the_same_code_in_another_place_is_the_same() -> None:
    here, there = fingerprint([_plugin(source_file="/a/rm.py")]), fingerprint([_plugin(source_file="/b/rm.py")])
    check_same_code(here, [("rollout", "node-1", there)])


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        ([_plugin(version="1.1")], "rewards 'math': version 1.0 here, 1.1 there"),
        ([_plugin(sha256="b" * 64)], f"source hash {'a' * 12} here, {'b' * 12} there"),
        ([], "rewards 'math' is not there"),
        ([_plugin(), _plugin(kind="filters")], "filters 'math' is only there"),
    ],
)
def test_other_code(theirs: list[dict[str, Any]], message: str) -> None:
    actors = [("trainer rank 0", "node-1", fingerprint([_plugin()])), ("rollout", "node-2", fingerprint(theirs))]
    with pytest.raises(ConfigError) as caught:
        check_same_code(fingerprint([_plugin()]), actors)
    assert message in str(caught.value)
    assert "node-2 (rollout)" in str(caught.value)
    assert "node-1" not in str(caught.value)
