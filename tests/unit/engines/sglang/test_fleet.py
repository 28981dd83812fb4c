from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from slime_engine_http.plan import LaunchPlan, ModelPlan, ServerPlan
from slime_engine_http.service import Place
from slime_engine_sglang.engine import SglangEngine
from slime_engine_sglang.fleet import Fleet

from slime_core.config import load_settings
from slime_core.errors import ConfigError, EngineError

pytestmark = pytest.mark.usefixtures("fake_servers")
Make = Callable[..., Fleet]


def plan_of(*servers: dict[str, Any], kinds: tuple[str, ...] = ()) -> LaunchPlan:
    plans = [
        ServerPlan(
            f"default/{i}",
            kinds[i] if kinds else "regular",  # type: ignore[arg-type]
            {"model_path": "/models/m", **arguments},
            needs_encoder_urls=bool(kinds) and kinds[i] == "regular",
        )
        for i, arguments in enumerate(servers)
    ]
    return LaunchPlan((ModelPlan("default", "/models/m", True, tuple(plans), None),), "cuda")


def guards() -> list[psutil.Process]:
    children = psutil.Process().children(recursive=True)
    return [p for p in children if p.status() != psutil.STATUS_ZOMBIE and "guard.py" in " ".join(p.cmdline())]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[Fleet] = []

    def fleet(plan: LaunchPlan, timeout: float = 20.0) -> Fleet:
        made.append(Fleet(plan, Place(Path(sys.executable), tmp_path / "engines", timeout)))
        return made[-1]

    yield fleet
    for one in made:
        one.stop()


async def test_all_are_ready_and_all_end(make: Make, tmp_path: Path) -> None:
    fleet = make(plan_of({}, {"not_ready": 1}))
    await fleet.launch()
    (model,) = fleet.models
    workers = model.workers()
    assert [w.url for w in workers] == [s.url for s in model.servers]
    assert all(w.owned and w.state.value == "ready" for w in workers)
    assert sorted(p.name for p in (tmp_path / "engines/default").iterdir()) == ["0.log", "1.log"]
    fleet.stop()
    assert guards() == []
    fleet.stop()


async def test_one_that_fails_ends_the_wait_for_the_others(make: Make) -> None:
    fleet = make(plan_of({"not_ready": -1}, {"die": "ValueError: no"}), timeout=60.0)
    began = time.monotonic()
    with pytest.raises(EngineError, match=r"default/1 did not come up.*ValueError: no"):
        await fleet.launch()
    assert time.monotonic() - began < 30
    fleet.stop()
    assert guards() == []


def test_a_fleet_that_cannot_be_made_gives_its_ports_back(
    make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = ModelPlan("default", "/models/m", True, plan_of({}).servers, router={"port": 1})
    reserved: list[Any] = []
    from slime_engine_http import service

    real = service.reserve
    monkeypatch.setattr(service, "reserve", lambda *a, **k: reserved.append(real(*a, **k)) or reserved[-1])
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        router = {"port": taken.getsockname()[1]}
        with pytest.raises(EngineError, match=f"port {router['port']} is taken"):
            make(LaunchPlan((ModelPlan(model.name, model.model_path, True, model.servers, router),), "cuda"))
    assert len(reserved) == 1
    with socket.socket() as free:
        free.bind(("", reserved[0][0]))


@pytest.fixture
def engine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, engine_settings: Callable[..., Any]
) -> Callable[[LaunchPlan], SglangEngine]:
    def make_engine(plan: LaunchPlan, **flags: Any) -> SglangEngine:
        prefix = "slime_engine_sglang.engine."
        monkeypatch.setattr(prefix + "engine_python", lambda args: Path(sys.executable))
        monkeypatch.setattr(prefix + "installed_versions", lambda python: {"sglang": "0.5.20"})
        monkeypatch.setattr(prefix + "make_plan", lambda args, **_: plan)
        return SglangEngine(engine_settings(run_dir=str(tmp_path / "run"), **flags))

    return make_engine


async def test_half_a_start_leaves_nothing(engine: Callable[..., SglangEngine]) -> None:
    made = engine(plan_of({}, {"die": "ValueError: no"}))
    with pytest.raises(EngineError, match="default/1 did not come up"):
        await made.start()
    assert guards() == []
    assert made.fleet is None
    await made.stop()


async def test_it_publishes_where_it_answers(engine: Callable[..., SglangEngine]) -> None:
    made = engine(plan_of({}))
    try:
        await made.start()
        (worker,) = made.pool.workers
        host, port = await made.address()
        assert worker.url == f"http://{host}:{port}"
        assert made._args.sglang_model_routers == {"default": (host, port)}
        assert (made._args.sglang_router_ip, made._args.sglang_router_port) == (host, port)
        assert (Path(made._args.run_dir) / "engines/default/0.log").is_file()
    finally:
        await made.stop()
    assert guards() == []


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--lora-adapters a b", r"--lora-adapters 'a' 'b' .*type --lora-unmerged"),
        ("--lora-unmerged --check-weight-update-equal", "--check-weight-update-equal .*no checksums of adapters"),
        ("--lora-unmerged --update-weight-pause-mode retract", "--update-weight-pause-mode 'retract' .*type abort"),
        ("--lora-unmerged --update-weight-transport disk", "--update-weight-transport 'disk' .*shares with this run"),
        ("--lora-unmerged --rollout-external-engine-addrs h:1", "--rollout-external-engine-addrs .*shares with this"),
    ],
)
def test_what_adapters_exclude(flags: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime_engine_sglang.engine.engine_python", lambda args: Path("/env/bin/python"))
    argv = f"--hf-checkpoint /m --rollout-engine sglang --device cpu --save /s --lora-rank 8 {flags}"
    with pytest.raises(ConfigError, match=said):
        SglangEngine.check_settings(load_settings(argv.split(), command="serve", env={}))


def test_a_missing_environment_or_router_is_told_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    argv = ["--hf-checkpoint", "/models/m", "--rollout-engine", "sglang", "--device", "cpu", "--rollout-num-gpus", "1"]
    monkeypatch.delenv("SLIME_ENGINE_PYTHON", raising=False)
    settings = load_settings(argv, command="serve", env={})
    with pytest.raises(ConfigError, match=r"SGLang is not installed .*--engine-python"):
        SglangEngine.check_settings(settings)
    prefix = "slime_engine_sglang.engine."
    monkeypatch.setattr(prefix + "engine_python", lambda args: Path("/env/bin/python"))
    monkeypatch.setattr(prefix + "installed_versions", lambda python: {"sglang": "0.5.20"})
    install = "for /env/bin/python; type /env/bin/python -m pip install -U sglang-router, or --no-engine-router"
    with pytest.raises(ConfigError, match=f"sglang-router is not installed {install}"):
        SglangEngine.check_settings(settings)
    monkeypatch.setattr(prefix + "installed_versions", lambda python: {"sglang": "0.5.20", "sglang-router": "0.2.4"})
    with pytest.raises(ConfigError, match=f"sglang-router 0.2.4 is too old {install}"):
        SglangEngine.check_settings(settings)
    settings = load_settings([*argv, "--no-engine-router"], command="serve", env={})
    assert SglangEngine.check_settings(settings) == []
    monkeypatch.setattr(prefix + "installed_versions", lambda python: {"sglang": "0.6.1"})
    (warning,) = SglangEngine.check_settings(settings)
    assert warning.startswith("slime is tested with SGLang 0.5.20 and 0.5.23, not with 0.6.1. ")
    assert warning.endswith(" type: /env/bin/python -m pip install sglang==0.5.23")
