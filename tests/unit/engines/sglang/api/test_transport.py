from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from typing import Any

import pytest
from slime_engine_http.api import transport
from slime_engine_http.api.router import Router
from slime_engine_http.api.transport import Http
from slime_engine_http.api.worker import Worker

from slime_core.errors import ConfigError, EngineError
from tests.unit.engines.sglang.api.servers import Reaction, Server, die, servers


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


# -- router ----------------------------------------------------------------------------------------------

W = "http://127.0.0.1:1234"


class Workers:
    """`/workers`, which does what it is told two looks later."""

    def __init__(self) -> None:
        self.workers: dict[str, dict[str, Any]] = {}
        self.coming: list[Any] = []

    async def __call__(self, server: Server, request: Any, body: Any, before: int) -> Any:
        if request.path == "/workers" and request.method == "POST":
            self.coming = [body, body]
            return 202, {"status": "accepted"}
        if request.path == "/workers":
            if self.coming:
                body = self.coming.pop()
                self.workers[body["url"]] = {**body, "id": "u-1", "is_healthy": not self.coming}
            return {"workers": list(self.workers.values()), "total": len(self.workers)}
        if request.path == "/workers/u-1" and request.method == "DELETE":
            self.workers.clear()
            return 202, {}
        return 404, {"error": "no such path"}


async def test_adding_listing_and_removing() -> None:
    http = Http()
    await http.open()
    async with servers(Workers()) as (front,):
        router = Router(http, front.url)
        assert await router.list_workers() == []
        await router.add_worker(Worker(W, role="prefill"))
        assert await router.list_workers() == [W]
        assert front.asked("/workers")[1] == {"url": W, "worker_type": "prefill"}
        await router.remove_worker(W)
        assert await router.list_workers() == []
        await router.remove_worker(W)
        await router.add_worker(Worker(W, role="prefill", bootstrap_port=8998))
        assert front.asked("/workers")[-2 if front.asked("/workers")[-1] else -1] is None
        sent = [body for body in front.asked("/workers") if body]
        assert sent[-1] == {"url": W, "worker_type": "prefill", "bootstrap_port": 8998}
    await http.close()


async def test_a_worker_that_never_gets_healthy() -> None:
    async def never(server: Server, request: Any, body: Any, before: int) -> Any:
        return (202, {}) if request.method == "POST" else {"workers": [{"url": W, "is_healthy": False, "id": "u"}]}

    http = Http()
    await http.open()
    async with servers(never) as (front,):
        with pytest.raises(EngineError, match=f"worker {W}: the router has not found it healthy after 0 s"):
            await Router(http, front.url).add_worker(Worker(W), timeout=0.2)
        with pytest.raises(EngineError, match="the router still has it"):
            await Router(http, front.url).remove_worker(W, timeout=0.2)
    await http.close()


async def test_a_router_before_0_3_is_refused() -> None:
    async def old(server: Server, request: Any, body: Any, before: int) -> Any:
        return {"urls": []} if request.path == "/list_workers" else (404, {})

    async with servers(old) as (front,), Http() as http:
        with pytest.raises(ConfigError, match=r"is older than sglang-router 0\.3"):
            await Router(http, front.url).list_workers()


def request(**fields: Any) -> dict[str, Any]:
    return {"input_ids": [1], "rid": "r", "return_logprob": True, "sampling_params": {}} | fields


async def test_a_call_that_no_server_could_take_names_none() -> None:
    async with servers(first()) as (server,), http() as client:
        for body, headers in (({"a": object()}, None), ({"a": 2**70}, None), ({}, {"X-Key": "a\nb"})):
            with pytest.raises(EngineError, match="not to be sent") as caught:
                await client.send("POST", server.url, "/x", body, headers=headers)
            assert caught.value.url is None
        assert server.calls == []
