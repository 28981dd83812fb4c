"""`ServerProcess` and `Service`, with a process that answers as a server does."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from slime_engine_http import service
from slime_engine_sglang.programs import ServerProcess

from slime_core.errors import EngineError
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
