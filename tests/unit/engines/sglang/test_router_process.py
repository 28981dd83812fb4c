from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from slime_engine_http.service import Place
from slime_engine_sglang.programs import RouterProcess


@pytest.fixture
def fields(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """`RouterArgs` fields of the last command line."""
    seen: dict[str, Any] = {}

    def argv(given: dict[str, Any], python: Path, owner: str) -> list[str]:
        seen.clear()
        seen.update(given)
        return ["x"]

    monkeypatch.setattr("slime_engine_sglang.programs.to_argv", argv)
    return seen


def make(tmp_path: Path, **arguments: Any) -> RouterProcess:
    return RouterProcess("judge", arguments, Place(Path("/env/bin/python"), tmp_path, 1.0), device="cuda")


def test_workers_are_named_only_where_the_policy_needs_them(fields: dict[str, Any], tmp_path: Path) -> None:
    urls = ["http://a:1", "http://b:2"]
    for policy, wanted in [("power_of_two", urls), ("cache_aware", None)]:
        router = make(tmp_path, policy=policy)
        try:
            router.start_with(urls)
            assert router.needs_workers == (wanted is not None)
            router.command(router._ports)
            assert fields.get("worker_urls") == wanted
        finally:
            router.close()
