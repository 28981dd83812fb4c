from __future__ import annotations

import asyncio
import socket
import time
from typing import Any

import aiohttp
import pytest
from slime.utils import http_utils
from slime.utils.http_utils import (
    find_available_port,
    get,
    get_host_info,
    get_rollout_num_engines,
    init_http_client,
    is_port_available,
    post,
    wrap_ipv6,
)

from slime_core.config import Args


async def test_post_and_get(engine: Any) -> None:
    assert await post(f"{engine.url}/echo", {"a": [1]}, headers={"X-Mine": "1"}) == {"echo": {"a": [1]}}
    assert engine.requests[-1][2]["X-Mine"] == "1"
    assert await get(f"{engine.url}/health") == {"path": "/health"}


async def test_only_what_may_pass_is_tried_again(engine: Any) -> None:
    engine.refusals = [503, 429]
    assert await post(f"{engine.url}/echo", {}) == {"echo": {}}
    assert len(engine.requests) == 3
    engine.refusals = [400, 200]
    with pytest.raises(aiohttp.ClientResponseError, match=r"400, message=.*not now"):
        await post(f"{engine.url}/echo", {})
    assert len(engine.requests) == 4
    engine.refusals = [500] * 9
    with pytest.raises(aiohttp.ClientResponseError, match="500"):
        await post(f"{engine.url}/echo", {}, max_retries=2)
    assert len(engine.requests) == 6


async def test_nobody_there(free_port: int) -> None:
    with pytest.raises(aiohttp.ClientConnectorError):
        await post(f"http://127.0.0.1:{free_port}/", {}, max_retries=2)
    with pytest.raises(aiohttp.InvalidURL):
        await post("no-url", {})


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def test_all_attempts_have_one_deadline(engine: Any) -> None:
    engine.hold = True
    started = time.monotonic()
    with pytest.raises(TimeoutError, match=r"no answer within 0\.2 s \(--rollout-timeout"):
        await post(f"{engine.url}/generate", {}, timeout=0.2)
    engine.refusals = [503] * 99
    with pytest.raises(TimeoutError):
        await post(f"{engine.url}/echo", {}, timeout=0.3)
    assert time.monotonic() - started < 5


def test_each_loop_has_a_client_that_is_closed_with_it(engine: Any) -> None:
    clients = []

    async def use() -> None:
        await post(f"{engine.url}/echo", {})
        clients.append(http_utils._sessions[asyncio.get_running_loop()][0])

    for _ in range(2):
        asyncio.run(use())
    assert clients[0] is not clients[1]
    assert all(client.closed for client in clients)
    assert not [loop for loop in http_utils._sessions if loop.is_closed()]


def test_the_environments_proxy_is_not_used(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    assert asyncio.run(post(f"{engine.url}/echo", {}, max_retries=1)) == {"echo": {}}


def test_settings_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_utils, "_Settings", type("_Settings", (), {"connections": 1, "timeout": 1.0}))
    init_http_client(Args.model_construct(sglang_server_concurrency=7, rollout_timeout=9))
    assert (http_utils._Settings.connections, http_utils._Settings.timeout) == (7, 9.0)
    addresses = ["a:1", "b:2"]
    assert get_rollout_num_engines(Args.model_construct(rollout_external_engine_addrs=addresses)) == 2
    assert get_rollout_num_engines(Args.model_construct(rollout_external_engine_addrs=None)) == 1


def test_ports() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen(1)
        port = int(taken.getsockname()[1])
        assert not is_port_available(port)
        assert find_available_port(port) > port
    assert not is_port_available(70000)


def test_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    name, address = get_host_info()
    assert name == socket.gethostname()
    assert address
    monkeypatch.setenv("SLIME_HOST_IP", "10.1.2.3")
    assert get_host_info()[1] == "10.1.2.3"
    assert [wrap_ipv6(h) for h in ("::1", "[::1]", "10.0.0.1", "node-3")] == ["[::1]", "[::1]", "10.0.0.1", "node-3"]
