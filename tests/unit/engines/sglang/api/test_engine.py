from __future__ import annotations

from typing import Any

import pytest
from slime_engine_http.api.engine import HttpEngine

from slime_core.config import Args
from slime_core.errors import ConfigError, EngineError
from tests.unit.engines.sglang.api.servers import Server, servers, well


async def test_the_workers_of_a_router_are_found_and_requests_go_through_it() -> None:
    async with servers(well, well) as (worker, front):

        async def router(server: Server, request: Any, body: Any, before: int) -> Any:
            workers = {"workers": [{"url": worker.url, "id": "u", "is_healthy": True}]}
            return workers if request.path == "/workers" else await well(server, request, body, before)

        front.react = router
        host, port = front.address.split(":")
        engine = HttpEngine(Args(sglang_router_ip=host, sglang_router_port=int(port)))
        await engine.start()
        assert await engine.address() == (host, int(port))
        assert (await engine.generate([3], {})).token_ids == [1]
        await engine.abort()
        await engine.stop()
        assert [path for path, _, _ in front.calls] == ["/workers", "/generate"]
        assert worker.asked("/generate") == []
        assert worker.asked("/abort_request") == [{"abort_all": True}]


async def test_an_address_without_a_list_of_workers_is_a_server() -> None:
    async def lonely(server: Server, request: Any, body: Any, before: int) -> Any:
        return (404, {}) if "workers" in request.path else await well(server, request, body, before)

    async with servers(lonely) as (server,):
        host, port = server.address.split(":")
        engine = HttpEngine(Args(sglang_router_ip=host, sglang_router_port=int(port)))
        await engine.start()
        await engine.start()  # safe twice
        assert engine.router is None
        assert (await engine.generate([3], {})).token_ids == [0]
        await engine.stop()
        await engine.stop()
        with pytest.raises(EngineError, match="start"):
            await engine.generate([3], {})


async def test_settings_that_make_no_sense() -> None:
    async def nobody(*_: Any) -> Any:
        return {"workers": []}

    with pytest.raises(ConfigError, match="--rollout-external-engine-addrs"):
        await HttpEngine(Args()).start()
    with pytest.raises(ConfigError, match="HOST:PORT"):
        await HttpEngine(Args(rollout_external_engine_addrs=["localhost"])).start()
    with pytest.raises(EngineError, match="start"):
        await HttpEngine(Args(rollout_external_engine_addrs=["a:1"])).generate([1], {})
    async with servers(nobody) as (front,):
        host, port = front.address.split(":")
        with pytest.raises(EngineError, match="has no workers"):
            await HttpEngine(Args(sglang_router_ip=host, sglang_router_port=int(port))).start()
