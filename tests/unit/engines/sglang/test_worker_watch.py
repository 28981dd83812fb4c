"""One look at a server, against servers that answer as they are told."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from slime_engine_http import worker_watch
from slime_engine_http.api.transport import Answer, Http
from slime_engine_http.api.worker import Worker, WorkerPool, WorkerState
from slime_engine_http.incidents import Incidents
from slime_engine_http.servers import Supervised
from slime_engine_http.worker_watch import OtherWeightsError, WorkerWatch
from slime_runs.events import EventLog

from slime_core.config import Args


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


Look = Callable[..., WorkerWatch]


@pytest.fixture
async def watch(tmp_path: Path) -> AsyncIterator[Look]:
    """(worker, its pool, timeout, process) -> the watch on it."""
    http = Http(timeout=30)
    await http.open()

    def make(worker: Worker, pool: WorkerPool, timeout: float = 60, process: Any = None) -> WorkerWatch:
        args = Args(use_fault_tolerance=True, rollout_health_check_timeout=timeout)
        model = Supervised("default", pool, {} if process is None else {worker: process})
        return WorkerWatch(model, worker, None, http, args, Incidents(EventLog(tmp_path)))

    yield make
    await http.close()


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a look every answer takes 250 s, so that of 600 s there are 100 left for its third and last question."""
    send, answers = Http.send, 0

    async def counted(*given: Any, **options: Any) -> Answer:
        nonlocal answers
        try:
            return await send(*given, **options)
        finally:
            answers += 1

    monkeypatch.setattr(Http, "send", counted)
    monkeypatch.setattr(worker_watch, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + 250.0 * answers))


@pytest.mark.usefixtures("slow")
async def test_refusals_are_asked_again_until_the_time_is_up(server: Any, watch: Look) -> None:
    server.refusals = 100
    found = await watch(server.worker, server.pool, 600).look()
    assert "status 503" in found
    assert "(--rollout-health-check-timeout)" in found
    assert server.asked == ["/model_info", *["/health_generate"] * 3]


async def test_a_process_that_ends_ends_the_look(server: Any, watch: Look) -> None:
    server.refusals = 1000
    began = time.monotonic()

    class Process:
        name = "server 0"
        alive = property(lambda self: time.monotonic() < began + 0.5)

    assert await watch(server.worker, server.pool, 120, Process()).look() == "its process ended"
    assert time.monotonic() - began < 60


async def test_other_weights(server: Any, watch: Look) -> None:
    beat = watch(server.worker, server.pool)
    server.pool.version_wanted = 4
    assert await beat.look() == "serves weight version '3', wanted is 4"
    server.info["weight_version"] = "default"
    assert await beat.look() == "serves weight version 'default', wanted is 4"
    server.pool.update_lock.acquire()
    assert await beat.look() == ""
    with pytest.raises(OtherWeightsError):
        await beat.ask_weights(locked=True)


async def test_a_model_path_that_moves_without_an_update(server: Any, watch: Look) -> None:
    beat = watch(server.worker, server.pool)
    assert await beat.look() == ""
    server.info["model_path"] = "/other"
    assert await beat.look() == "serves /other, it was /m"
    server.pool.version_wanted = 3  # an update from disk moves it, and rightly
    assert await beat.look() == ""
    server.info["model_path"] = "/m"
    assert await beat.look() == "serves /m, it was /other"
    server.worker.loaded = None
    assert await beat.look() == ""
