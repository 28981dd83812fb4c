from __future__ import annotations

from typing import Any

import pytest
from slime_engine_http.api.router import Router
from slime_engine_http.api.transport import Http
from slime_engine_http.api.worker import Worker

from slime_core.errors import ConfigError, EngineError
from tests.unit.engines.sglang.api.servers import Server, servers

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
