from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from typing import Any

import pytest
from slime_engine_http.api import transport
from slime_engine_http.api.transport import Http

from slime_core.errors import ConfigError, EngineError
from tests.unit.engines.sglang.api.servers import Reaction, die, servers


@asynccontextmanager
async def http(**settings: Any) -> AsyncIterator[Http]:
    made = Http(**settings)
    await made.open()
    yield made
    await made.close()


def first(*statuses: int) -> Reaction:
    async def react(server: Any, request: Any, body: Any, before: int) -> Any:
        return (statuses[before], {"error": {"message": f"no {before}"}}) if before < len(statuses) else {"ok": True}

    return react


async def test_what_may_have_been_done_is_not_done_again() -> None:
    async with servers(die) as (server,), http() as client:
        with pytest.raises(EngineError, match="/update"):
            await client.send("POST", server.url, "/update", {}, repeat=False)
        assert len(server.calls) == 1
        with pytest.raises(EngineError):
            await client.send("POST", server.url, "/other", {})
        assert len(server.asked("/other")) == 4
    async with servers(first(500)) as (server,), http() as client:
        with pytest.raises(EngineError, match="500"):
            await client.send("POST", server.url, "/update", {}, repeat=False)
        assert len(server.calls) == 1
    async with servers(first(503, 429)) as (server,), http() as client:  # these promise that nothing was done
        assert (await client.send("POST", server.url, "/update", {}, repeat=False)).status == 200


async def test_the_environments_proxy_is_not_used_and_the_settings_is(monkeypatch: pytest.MonkeyPatch) -> None:
    async with servers(first(), first()) as (target, proxy), http() as client, http(proxy=proxy.url) as proxied:
        monkeypatch.setenv("http_proxy", proxy.url)
        await client.send("GET", target.url, "/x")
        assert (len(target.calls), len(proxy.calls)) == (1, 0)
        await proxied.send("GET", target.url, "/x")
        assert (len(target.calls), len(proxy.calls)) == (1, 1)


async def read(client: Http, url: str, seen: list[bytes]) -> None:
    async with client.events(url, "/s", {}) as response:
        async for line in transport.lines(response.content):
            seen.append(line)


async def test_before_open_and_addresses() -> None:
    with pytest.raises(EngineError, match="start"):
        await Http().send("GET", "http://127.0.0.1:1", "/x")
    assert transport.server_url("host:1") == transport.server_url("http://host:1/") == "http://host:1"
    assert transport.server_url("[::1]:30000") == transport.server_url("http://[::1]:30000") == "http://[::1]:30000"
    for wrong in (
        "host",
        "::1:30000",
        "host:0",
        "host:70000",
        ":1",
        "[::1]",
        "ftp://host:1",
        "http://host:1/path",
        "a:b",
    ):
        with pytest.raises(ConfigError, match="HOST:PORT"):
            transport.server_url(wrong)


async def test_a_host_that_does_not_answer_to_a_connection_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "CONNECT_TIMEOUT_S", 0.1)
    with socket.socket() as full:  # nobody accepts, and its queue is full
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        url = "http://127.0.0.1:{1}".format(*full.getsockname())
        with ExitStack() as stack:
            for _ in range(4):
                waiting = stack.enter_context(socket.socket())
                waiting.setblocking(False)
                waiting.connect_ex(full.getsockname())
            async with http() as client:
                with pytest.raises(EngineError, match=r"[Tt]imeout") as caught:
                    await client.send("POST", url, "/x", {}, attempts=1)
                assert (caught.value.reached, caught.value.status) == (False, None)
                with pytest.raises(EngineError, match=r"[Tt]imeout") as caught:
                    await read(client, url, [])
                assert (caught.value.reached, caught.value.status) == (False, None)
