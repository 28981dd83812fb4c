from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from slime_engine_http.plan import ServerPlan
from slime_engine_http.service import Place
from slime_engine_sglang.programs import ServerProcess

from slime_core.config import load_settings

FAKE = Path(__file__).with_name("fake_server.py")


class FakeServer(ServerProcess):
    """Runs `fake_server.py` with the plan's arguments."""

    def command(self, ports: Any) -> list[str]:
        words = [f"{name}={value}" for name, value in self.arguments.items() if name != "model_path"]
        return [sys.executable, str(FAKE), str(ports[0]), *words]


@pytest.fixture
def fake_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers of a fleet are fake ones."""
    monkeypatch.setattr("slime_engine_sglang.fleet.ServerProcess", FakeServer)


@pytest.fixture
def make_server(tmp_path: Path) -> Iterator[Callable[..., FakeServer]]:
    made: list[FakeServer] = []

    def make(*, timeout: float = 20.0, environment: dict[str, str] | None = None, **arguments: Any) -> FakeServer:
        plan = ServerPlan(
            "default/0", "regular", {"model_path": "/models/m", **arguments}, environment=environment or {}
        )
        made.append(FakeServer(plan, Place(Path(sys.executable), tmp_path / "engines", timeout)))
        return made[-1]

    yield make
    for server in made:
        server.kill()
        server.close()


@pytest.fixture
def engine_settings(tmp_path: Path) -> Callable[..., Any]:
    """Settings of a run with the `sglang` engine; keywords replace attributes."""

    def make(**changes: Any) -> Any:
        argv = ["--hf-checkpoint", "/models/m", "--rollout-engine", "sglang", "--device", "cpu"]
        args = load_settings([*argv, "--engine-start-timeout", "20"], command="serve", env={}).args
        for name, value in changes.items():
            setattr(args, name, value)
        return args

    return make
