from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from slime_engine_http.ports import reserve
from slime_engine_http.service import Place
from slime_engine_sglang.programs import RouterProcess

from slime_core.errors import EngineError


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


def test_it_has_a_metrics_port_of_its_own(fields: dict[str, Any], tmp_path: Path) -> None:
    first, second = make(tmp_path), make(tmp_path, policy="round_robin")
    try:
        program = first.command(first._ports)
        assert program[0] == "/env/bin/python"
        assert program[1].endswith("server_side/router_main.py")
        assert Path(program[1]).is_file()
        ports = {fields["port"], fields["prometheus_port"]}
        assert fields["host"] == fields["prometheus_host"] == "127.0.0.1"
        assert first.url == f"http://127.0.0.1:{fields['port']}"
        second.command(second._ports)
        assert fields["policy"] == "round_robin"
        assert len(ports | {fields["port"], fields["prometheus_port"]}) == 4
    finally:
        first.close()
        second.close()


def test_a_port_that_the_user_chose(fields: dict[str, Any], tmp_path: Path) -> None:
    with reserve() as free:
        port = free[0]
        with pytest.raises(EngineError, match=f"port {port} is taken"):
            make(tmp_path, port=port)
    router = make(tmp_path, port=port)
    try:
        router.command(router._ports)
        assert router.port == fields["port"] == port
    finally:
        router.close()


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
