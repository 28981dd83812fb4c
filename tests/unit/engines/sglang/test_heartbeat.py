"""One look at a server, against servers that answer as they are told."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from slime_engine_sglang import heartbeat
from slime_engine_sglang.api.transport import Answer, Http
from slime_engine_sglang.api.worker import Worker, WorkerPool, WorkerState
from slime_engine_sglang.heartbeat import HEALTHY, Heartbeat


class Server:
    """Answers as its attributes say."""

    def __init__(self) -> None:
        self.info: Any = {"model_path": "/m", "weight_version": "3"}
        self.refusals = 0
        """So many health requests are refused before the next one passes."""
        self.asked: list[str] = []

    async def answer(self, request: web.Request) -> web.Response:
        self.asked.append(request.path)
        if request.path.endswith("model_info"):
            return web.json_response(self.info)
        self.refusals -= 1
        return web.Response(status=503 if self.refusals >= 0 else 200)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    made = Server()
    app = web.Application()
    app.router.add_get("/{path}", made.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    made.worker = Worker(f"http://127.0.0.1:{runner.addresses[0][1]}", state=WorkerState.READY)  # type: ignore[attr-defined]
    made.pool = WorkerPool([made.worker])  # type: ignore[attr-defined]
    yield made
    await runner.cleanup()


@pytest.fixture
async def http() -> AsyncIterator[Http]:
    made = Http(timeout=30)
    await made.open()
    yield made
    await made.close()


@pytest.fixture
def slow(http: Http, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a look every answer takes 250 s, so that of 600 s there are 100 left for its third and last question."""
    send, answers = http.send, 0

    async def counted(*given: Any, **options: Any) -> Answer:
        nonlocal answers
        try:
            return await send(*given, **options)
        finally:
            answers += 1

    monkeypatch.setattr(http, "send", counted)
    monkeypatch.setattr(heartbeat, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + 250.0 * answers))


async def test_healthy(server: Any, http: Http) -> None:
    server.pool.version_wanted = 3
    assert await Heartbeat(http, 60).look(server.pool, server.worker) is HEALTHY
    assert server.asked == ["/model_info", "/health_generate"]


async def test_a_refusal_is_asked_again(server: Any, http: Http) -> None:
    server.refusals = 2
    assert await Heartbeat(http, 60).look(server.pool, server.worker) is HEALTHY


@pytest.mark.usefixtures("slow")
async def test_refusals_are_asked_again_until_the_time_is_up(server: Any, http: Http) -> None:
    server.refusals = 100
    finding = await Heartbeat(http, 600).look(server.pool, server.worker)
    assert "status 503" in finding.reason
    assert "(--rollout-health-check-timeout)" in finding.reason
    assert not finding.lying
    assert server.asked == ["/model_info", *["/health_generate"] * 3]


async def test_a_process_that_ends_ends_the_look(server: Any, http: Http) -> None:
    server.refusals = 1000
    began = time.monotonic()
    finding = await Heartbeat(http, 120).look(server.pool, server.worker, lambda: time.monotonic() < began + 0.5)
    assert finding.reason == "its process ended"
    assert time.monotonic() - began < 60


async def test_other_weights(server: Any, http: Http) -> None:
    beat = Heartbeat(http, 60)
    server.pool.version_wanted = 4
    finding = await beat.look(server.pool, server.worker)
    assert (finding.reason, finding.lying) == ("serves weight version '3', wanted is 4", True)
    server.info["weight_version"] = "default"
    assert (await beat.look(server.pool, server.worker)).lying
    server.pool.update_lock.acquire()
    assert await beat.look(server.pool, server.worker) is HEALTHY
    assert (await beat.weights(server.pool, server.worker, locked=True)).lying


async def test_a_model_path_that_moves_without_an_update(server: Any, http: Http) -> None:
    beat = Heartbeat(http, 60)
    assert await beat.look(server.pool, server.worker) is HEALTHY
    server.info["model_path"] = "/other"
    finding = await beat.look(server.pool, server.worker)
    assert (finding.reason, finding.lying) == ("serves /other, it was /m", True)
    server.pool.version_wanted = 3  # an update from disk moves it, and rightly
    assert await beat.look(server.pool, server.worker) is HEALTHY
    server.info["model_path"] = "/m"
    assert (await beat.look(server.pool, server.worker)).lying
    server.worker.loaded = None
    assert await beat.look(server.pool, server.worker) is HEALTHY


@pytest.mark.slow
@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("answer", ["nonsense", [], {}])
async def test_an_answer_that_is_none(server: Any, http: Http, answer: Any) -> None:
    server.info = answer
    finding = await Heartbeat(http, 600).look(server.pool, server.worker)
    assert "no JSON object" in finding.reason
    assert server.asked == ["/model_info"] * 3


@pytest.mark.usefixtures("slow")
async def test_nobody_listens(http: Http) -> None:
    worker = Worker("http://127.0.0.1:9", state=WorkerState.READY)
    finding = await asyncio.wait_for(Heartbeat(http, 600).look(WorkerPool([worker]), worker), 60)
    assert "Cannot connect" in finding.reason
