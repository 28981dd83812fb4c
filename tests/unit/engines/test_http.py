from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI, Request, Response

from slime_core.engines import http
from slime_core.engines.embedded.server import bind
from slime_core.engines.http import HttpEngine
from slime_core.errors import ConfigError, EngineError, WeightSyncError

ANSWER = {
    "text": "x",
    "output_ids": [7],
    "meta_info": {
        "id": "r", "finish_reason": {"type": "stop"}, "prompt_tokens": 1, "completion_tokens": 1,
        "output_token_logprobs": [[-0.5, 7, None]],
    },
}  # fmt: skip
Script = Callable[[str, int], tuple[int, Any]]


class Worker:
    """A server that follows a script (path, call number) -> (status, body) and remembers what it was asked."""

    def __init__(self, script: Script) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.url = ""
        self.app = FastAPI()

        @self.app.api_route("/{path:path}", methods=["GET", "POST"])
        async def everything(path: str, request: Request) -> Response:
            raw = await request.body()
            body = await request.json() if raw else None
            self.calls.append((f"/{path}", body))
            status, answer = script(f"/{path}", sum(p == f"/{path}" for p, _ in self.calls))
            if answer == "hang":
                await asyncio.sleep(30)
            import orjson

            return Response(orjson.dumps(answer), status, media_type="application/json")

    def asked(self, path: str) -> list[Any]:
        return [body for p, body in self.calls if p == path]


@asynccontextmanager
async def workers(*scripts: Script) -> AsyncIterator[list[Worker]]:
    made, running = [], []
    for script in scripts:
        worker, sock = Worker(script), bind("127.0.0.1", 0)
        worker.url = f"127.0.0.1:{sock.getsockname()[1]}"
        server = uvicorn.Server(uvicorn.Config(worker.app, log_level="critical", lifespan="off"))
        running.append((server, asyncio.create_task(server.serve(sockets=[sock]))))
        made.append(worker)
        while not server.started:
            await asyncio.sleep(0.005)
    yield made
    for server, task in running:
        server.should_exit = server.force_exit = True
        await task


def well(path: str, call: int) -> tuple[int, Any]:
    return 200, ANSWER if path == "/generate" else {"success": True}


def failing(path: str, *statuses: int) -> Script:
    def script(asked: str, call: int) -> tuple[int, Any]:
        if asked == path and call <= len(statuses):
            return statuses[call - 1], {"error": {"message": f"refused {call}"}}
        return well(asked, call)

    return script


def engine_for(*made: Worker, **args: Any) -> HttpEngine:
    return HttpEngine(SimpleNamespace(rollout_external_engine_addrs=[w.url for w in made], **args))


@pytest.fixture(autouse=True)
def _short_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "FIRST_DELAY_S", 0.01)


async def test_busy_answers_are_tried_again() -> None:
    async with workers(failing("/generate", 503, 429, 500)) as (worker,):
        engine = engine_for(worker)
        await engine.start()
        output = await engine.generate([3], {"temperature": 1.0}, rid="r", session_id="s")
        await engine.stop()
    assert (output.token_ids, output.log_probs, output.text) == ([7], [-0.5], "x")
    assert len(worker.asked("/generate")) == 4
    assert worker.asked("/generate")[0] == {
        "input_ids": [3], "sampling_params": {"temperature": 1.0}, "rid": "r", "return_logprob": True,
    }  # fmt: skip


@pytest.mark.parametrize(("statuses", "calls"), [((400,), 1), ((404,), 1), ((503, 503, 503, 503, 503), 4)])
async def test_refusals_are_not_and_patience_ends(statuses: tuple[int, ...], calls: int) -> None:
    async with workers(failing("/generate", *statuses)) as (worker,):
        engine = engine_for(worker)
        await engine.start()
        with pytest.raises(EngineError, match=f"/generate.*{statuses[0]}.*refused {calls}"):
            await engine.generate([3], {})
        await engine.stop()
    assert len(worker.asked("/generate")) == calls


async def test_waiting_ends_at_the_timeout() -> None:
    def hang(path: str, call: int) -> tuple[int, Any]:
        return 200, "hang" if path == "/generate" else {}

    async with workers(hang) as (worker,):
        engine = engine_for(worker, rollout_timeout=0.3)
        await engine.start()
        with pytest.raises(EngineError, match="--rollout-timeout"):
            await engine.generate([3], {})
        await engine.stop()


async def test_control_goes_to_all_and_sessions_stick() -> None:
    async with workers(well, well, well) as made:
        engine = engine_for(*made)
        await engine.start()
        await asyncio.gather(*(engine.generate([3], {}) for _ in range(9)))
        assert [len(w.asked("/generate")) for w in made] == [3, 3, 3]
        for _ in range(4):
            await engine.generate([3], {}, session_id="a")
        assert sorted(len(w.asked("/generate")) for w in made) == [3, 3, 7]
        await engine.abort("x")
        await engine.abort()
        await engine.pause("retract")
        await engine.resume()
        await engine.flush_cache()
        for worker in made:
            assert worker.asked("/abort_request") == [{"rid": "x"}, {"abort_all": True}]
            assert worker.asked("/pause_generation") == [{"mode": "retract"}]
            assert len(worker.asked("/continue_generation")) == len(worker.asked("/flush_cache")) == 1
        await engine.stop()


async def test_one_worker_that_refuses_weights_fails_the_update(tmp_path: Any) -> None:
    def refuse(path: str, call: int) -> tuple[int, Any]:
        bad = path == "/update_weights_from_disk"
        return 200, {"success": False, "message": "no space"} if bad else {"checksums": {"w": "2"}}

    def agree(path: str, call: int) -> tuple[int, Any]:
        return 200, {"success": True, "checksums": {"w": "1"}}

    async with workers(agree, refuse) as made:
        engine = engine_for(*made)
        await engine.start()
        with pytest.raises(WeightSyncError, match=f"{made[1].url}.*no space"):
            await engine.update_weights_from_disk(tmp_path, 3)
        assert made[0].asked("/update_weights_from_disk") == [{"model_path": str(tmp_path), "weight_version": "3"}]
        with pytest.raises(WeightSyncError, match="other weights"):
            await engine.weight_checksums()
        with pytest.raises(WeightSyncError, match="disk"):
            await engine.update_weights_from_tensor([], 3)
        await engine.stop()


async def test_a_routers_workers_are_asked_directly() -> None:
    async with workers(well) as (worker,):

        def router(path: str, call: int) -> tuple[int, Any]:
            return 200, {"workers": [{"url": f"http://{worker.url}"}]} if path == "/workers" else {}

        async with workers(router) as (front,):
            host, port = front.url.split(":")
            engine = HttpEngine(SimpleNamespace(sglang_router_ip=host, sglang_router_port=int(port)))
            await engine.start()
            await engine.generate([3], {})
            await engine.stop()
            assert [path for path, _ in front.calls] == ["/workers"]
    assert len(worker.asked("/generate")) == 1


async def test_settings_and_answers_that_make_no_sense() -> None:
    with pytest.raises(ConfigError, match="--rollout-external-engine-addrs"):
        await HttpEngine(SimpleNamespace()).start()
    with pytest.raises(ConfigError, match="HOST:PORT"):
        await HttpEngine(SimpleNamespace(rollout_external_engine_addrs=["localhost"])).start()
    with pytest.raises(EngineError, match="start"):
        await HttpEngine(SimpleNamespace(rollout_external_engine_addrs=["a:1"])).generate([1], {})
    unscored = {**ANSWER, "meta_info": {"output_token_logprobs": [[None, 7, None]]}}
    for nonsense in ({"hello": 1}, unscored):
        async with workers(lambda path, call, nonsense=nonsense: (200, nonsense)) as (worker,):
            engine = engine_for(worker)
            await engine.start()
            with pytest.raises(EngineError, match="not an answer"):
                await engine.generate([1], {})
            await engine.stop()
