"""`ServerProcess` and `Service`, with a process that answers as a server does."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from slime_engine_http import service
from slime_engine_http.plan import LaunchPlan, ModelPlan, ServerPlan
from slime_engine_http.service import Place
from slime_engine_sglang.engine import SglangEngine
from slime_engine_sglang.fleet import Fleet
from slime_engine_sglang.programs import RouterProcess, ServerProcess

from slime_core.config import load_settings
from slime_core.errors import ConfigError, EngineError
from tests.unit.engines.sglang.conftest import FAKE

Make = Callable[..., ServerProcess]


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


async def test_another_model_is_an_error_at_once(make_server: Make) -> None:
    server = make_server(model="/models/other", timeout=120.0)
    began = time.monotonic()
    with pytest.raises(EngineError, match=r"what answers at http://.* serves model '/models/other', not '/models/m'"):
        await server.launch()
    assert time.monotonic() - began < 60


async def test_somebody_else_at_its_port_keeps_it(make_server: Make) -> None:
    server = make_server()
    first = server.port
    stranger = subprocess.Popen([sys.executable, str(FAKE), str(first), "model=/models/other"])
    try:
        while not _listens(first):
            await asyncio.sleep(0.01)
        await server.launch()
        assert server.port != first
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


async def test_running_but_never_ready(make_server: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    server = make_server(not_ready=-1, timeout=120.0)
    ask, answers = server.check, 0

    async def check(http: Any, left: float) -> None:
        nonlocal answers
        try:
            await ask(http, left)
        except EngineError as error:
            answers += error.status is not None
            raise

    # Each answer takes 45 s more of the deadline, so that it never cuts a request short.
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + 45.0 * answers)
    monkeypatch.setattr(service, "time", clock)
    monkeypatch.setattr(server, "check", check)
    with pytest.raises(EngineError) as caught:
        await server.launch()
    first, *rest = str(caught.value).splitlines()
    assert first.startswith(
        "SGLang server default/0 is running, but not ready after 120 s (--engine-start-timeout); last answer:"
        f" 127.0.0.1:{server.port}/health_generate: status 503: "
    )
    assert first.endswith(f": listening at {server.port}")
    assert rest[0] == f"  last lines of {server.log}:"
    assert answers == 3
    assert server.alive, "whoever waits decides what becomes of it"


async def test_a_server_that_ends_is_not_waited_for(make_server: Make) -> None:
    server = make_server(die="Traceback (most recent call last):\nValueError: no such model\nbye", timeout=120.0)
    began = time.monotonic()
    with pytest.raises(EngineError) as caught:
        await server.launch()
    assert time.monotonic() - began < 60
    first, *rest = str(caught.value).splitlines()
    assert first.startswith("SGLang server default/0 did not come up: after ")
    assert first.endswith(" s it exited with status 1: ValueError: no such model")
    assert rest[-1].strip() == "bye"


@pytest.mark.slow
async def test_a_frozen_server_is_alive_and_not_ready(make_server: Make) -> None:
    server = make_server()
    await server.launch()
    for process in psutil.Process(server.pid).children(recursive=True):
        if "fake_server" in " ".join(process.cmdline()):
            frozen = process.pid
    os.kill(frozen, signal.SIGSTOP)
    with pytest.raises(EngineError, match=r"not ready after 1 s .*: no answer within"):
        await server.wait_ready(1.0)
    assert server.alive
    await server.restart()
    assert server.alive
    assert not psutil.pid_exists(frozen)


async def test_restart_keeps_the_address_and_appends_to_the_log(make_server: Make) -> None:
    server = make_server()
    await server.launch()
    url = server.url
    server.kill()
    assert server.last_words().startswith("was killed by signal 9 (SIGKILL); last lines of ")
    await server.restart()
    assert server.url == url
    text = server.log.read_text()
    assert text.count("SGLang server default/0, start ") == 2
    assert text.count(f"listening at {server.port}") == 2


async def test_a_taken_port_is_given_up_for_another(make_server: Make, tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    server = make_server(taken=tmp_path / "taken")
    first = server.url
    await server.launch()
    assert server.url != first
    assert not (tmp_path / "taken").exists()


async def test_what_it_inherits(make_server: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    of_torchrun = {"RANK": "3", "MASTER_PORT": "1", "ROLE_RANK": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in {**of_torchrun, "SEEN": "yes", "no_proxy": "other"}.items():
        monkeypatch.setenv(name, value)
    server = make_server(environment={"OF_PLAN": "1"})
    await server.launch()
    with urllib.request.urlopen(f"{server.url}/model_info", timeout=60) as answer:
        seen: dict[str, Any] = json.load(answer)["environment"]
    assert seen["SEEN"] == "yes"
    assert seen["PYTHONSAFEPATH"] == "1"
    assert seen["OF_PLAN"] == "1"
    assert seen["no_proxy"] == "other,localhost,127.0.0.1"
    assert not of_torchrun.keys() & seen.keys()


# -- the router's process --------------------------------------------------------------------------------


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


def router(tmp_path: Path, **arguments: Any) -> RouterProcess:
    return RouterProcess("judge", arguments, Place(Path("/env/bin/python"), tmp_path, 1.0), device="cuda")


def test_workers_are_named_only_where_the_policy_needs_them(fields: dict[str, Any], tmp_path: Path) -> None:
    urls = ["http://a:1", "http://b:2"]
    for policy, wanted in [("power_of_two", urls), ("cache_aware", None)]:
        made = router(tmp_path, policy=policy)
        try:
            made.start_with(urls)
            assert made.needs_workers == (wanted is not None)
            made.command(made._ports)
            assert fields.get("worker_urls") == wanted
        finally:
            made.close()


# -- fleets ----------------------------------------------------------------------------------------------

pytestmark = pytest.mark.usefixtures("fake_servers")
MakeFleet = Callable[..., Fleet]


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
def make(tmp_path: Path) -> Iterator[MakeFleet]:
    made: list[Fleet] = []

    def fleet(plan: LaunchPlan, timeout: float = 20.0) -> Fleet:
        made.append(Fleet(plan, Place(Path(sys.executable), tmp_path / "engines", timeout)))
        return made[-1]

    yield fleet
    for one in made:
        one.stop()


async def test_all_are_ready_and_all_end(make: MakeFleet, tmp_path: Path) -> None:
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


async def test_one_that_fails_ends_the_wait_for_the_others(make: MakeFleet) -> None:
    fleet = make(plan_of({"not_ready": -1}, {"die": "ValueError: no"}), timeout=60.0)
    began = time.monotonic()
    with pytest.raises(EngineError, match=r"default/1 did not come up.*ValueError: no"):
        await fleet.launch()
    assert time.monotonic() - began < 30
    fleet.stop()
    assert guards() == []


def test_a_fleet_that_cannot_be_made_gives_its_ports_back(
    make: MakeFleet, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
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


def test_ports_of_prefill_and_data_parallel_servers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fields: dict[str, Any] = {}
    monkeypatch.setattr("slime_engine_sglang.programs.to_argv", lambda given, python: fields.update(given) or ["x"])

    def port(kind: Any, **arguments: Any) -> ServerProcess:
        plan = ServerPlan("default/0", kind, {"model_path": "/models/m", **arguments})
        with contextlib.closing(ServerProcess(plan, Place(Path("/env/bin/python"), tmp_path, 1.0))) as server:
            assert server.command(server._ports)[2] == "sglang.launch_server"
        return server

    server = port("prefill", language_only=True)
    assert fields["disaggregation_bootstrap_port"] == server.bootstrap_port == server.port + 2
    assert fields["encoder_bootstrap_port"] == server.port + 3
    server = port("regular", attn_dp_size=4)
    assert (fields["dist_init_addr"], len(server._ports)) == (f"127.0.0.1:{server.port + 2}", 2 + 30 + 4)
