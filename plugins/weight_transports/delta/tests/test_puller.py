"""The puller between a directory of versions and engines: real requests, small engines that keep what they are told."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from aiohttp import web
from safetensors.torch import load_file, save_file
from slime_weight_transport_delta import puller as module
from slime_weight_transport_delta.format import _digest
from slime_weight_transport_delta.puller import Puller, serve
from slime_weight_transport_delta.writer import DeltaWriter


@asynccontextmanager
async def engine(refuses: str = "", hangs: bool = False, raw: str = "") -> AsyncIterator[tuple[str, list[Any]]]:
    """A server that takes /update_weights_from_disk, or not; its URL and what it was asked."""
    asked: list[Any] = []

    async def update(request: web.Request) -> web.Response:
        asked.append(await request.json())
        if hangs:
            await asyncio.sleep(3600)
        if raw:
            return web.Response(text=raw, status=502)
        return web.json_response({"success": not refuses, "message": refuses or "ok"}, status=400 if refuses else 200)

    app = web.Application()
    app.router.add_post("/update_weights_from_disk", update)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", asked
    finally:
        await runner.cleanup()


@asynccontextmanager
async def pulling(tmp_path: Path, urls: list[str], timeout: float = 30) -> AsyncIterator[Any]:
    """A puller that serves; `await ask(path, body)` -> status, answer."""
    port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    puller = Puller(tmp_path / "source", tmp_path / "local", urls, timeout=timeout)
    task = asyncio.create_task(serve(puller, "127.0.0.1", 0, port.set_result))
    async with aiohttp.ClientSession() as session:

        async def ask(path: str, body: Any = None) -> tuple[int, Any]:
            method = "GET" if body is None else "POST"
            async with session.request(method, f"http://127.0.0.1:{await port}{path}", json=body) as answer:
                return answer.status, await answer.json()

        try:
            yield ask
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
def writer(tmp_path: Path) -> DeltaWriter:
    (tmp_path / "model").mkdir()
    save_file({"a": torch.zeros(4)}, tmp_path / "model" / "model.safetensors")
    made = DeltaWriter(tmp_path / "source", tmp_path / "model", run_dir="test")
    made.write([("a", torch.zeros(4))], 1)
    made.write([("a", torch.tensor([0.0, 1, 0, 0]))], 2)
    return made


async def test_a_version_is_brought_and_loaded_by_every_engine(tmp_path: Path, writer: DeltaWriter) -> None:
    async with engine() as (one, asked_one), engine() as (two, asked_two), pulling(tmp_path, [one, two]) as ask:
        assert await ask("/health") == (200, {"status": "ok"})
        status, answer = await ask("/pull", {"version": 2})
        assert status == 200
        assert answer["success"] is True
        assert answer["version"] == 2
        assert answer["bytes"] > 0
        assert answer["seconds"] > 0
        assert {url: outcome["success"] for url, outcome in answer["engines"].items()} == {one: True, two: True}
        local = str(tmp_path / "local")
        assert asked_one == asked_two == [{"model_path": local, "weight_version": "2"}]
        assert torch.equal(load_file(tmp_path / "local" / "model.safetensors")["a"], torch.tensor([0.0, 1, 0, 0]))
        _, told = await ask("/status")
        assert (told["version"], told["engine_urls"], told["busy"]) == (2, [one, two], False)
        await ask("/pull", {"version": 2, "engine_urls": [two], "flush_cache": False})
        assert len(asked_one) == 1
        assert asked_two[1] == {"model_path": local, "weight_version": "2", "flush_cache": False}


async def test_an_engine_that_fails_is_named_and_the_others_are_not(tmp_path: Path, writer: DeltaWriter) -> None:
    async with (
        engine() as (good, _),
        engine(refuses="out of memory") as (bad, _),
        engine(raw="<html>") as (odd, _),
        pulling(tmp_path, [good, bad, odd, "http://127.0.0.1:9"]) as ask,
    ):
        status, answer = await ask("/pull", {"version": 1})
        assert status == 409
        assert answer["success"] is False
        outcomes = answer["engines"]
        assert outcomes[good]["success"]
        assert [outcomes[u]["success"] for u in (bad, odd, "http://127.0.0.1:9")] == [False] * 3
        assert outcomes[bad]["message"] == "out of memory"
        assert f"{bad}: out of memory" in answer["message"]
        assert "127.0.0.1:9" in answer["message"]


async def test_a_version_that_cannot_be_applied_reaches_no_engine(tmp_path: Path, writer: DeltaWriter) -> None:
    async with engine() as (url, asked), pulling(tmp_path, [url]) as ask:
        status, answer = await ask("/pull", {"version": 7})
        assert (status, answer["success"], answer["engines"]) == (409, False, {})
        assert "weight version 7 is not in" in answer["message"]
        assert asked == []


async def test_a_checksum_whose_package_is_missing_is_named(
    tmp_path: Path, writer: DeltaWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = tmp_path / "source" / "weight_v000001" / "model.safetensors.index.json"
    value = json.loads(index.read_text())
    del value["digest"]
    value["metadata"]["checksum_format"] = "blake3"
    index.write_text(json.dumps({**value, "digest": _digest(value)}))
    monkeypatch.setitem(sys.modules, "blake3", None)
    async with engine() as (url, asked), pulling(tmp_path, [url]) as ask:
        status, answer = await ask("/pull", {"version": 1})
        assert (status, answer["success"], asked) == (409, False, [])
        assert "pip install 'slime-rl[blake3]'" in answer["message"]


async def test_an_engine_that_hangs_costs_no_more_than_the_deadline(
    tmp_path: Path, writer: DeltaWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, answered, load_one = asyncio.get_running_loop(), asyncio.Event(), module._load_one
    now = loop.time()

    async def noted(*arguments: Any) -> Any:
        outcome = await load_one(*arguments)
        answered.set()
        return outcome

    monkeypatch.setattr(module, "_load_one", noted)
    async with engine(hangs=True) as (hung, _), engine() as (good, _), pulling(tmp_path, [hung, good]) as ask:
        with monkeypatch.context() as frozen:
            frozen.setattr(loop, "time", lambda: now)  # no deadline passes before the good one has answered
            pull = asyncio.create_task(ask("/pull", {"version": 1, "timeout": 2.5}))
            await answered.wait()
            now += 2.3
            _, answer = await pull
        assert answer["engines"][good]["success"]
        assert "no answer within" in answer["engines"][hung]["message"]


@pytest.mark.slow
async def test_a_slow_disk_ends_at_the_deadline_and_is_waited_for(
    tmp_path: Path, writer: DeltaWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, running = module.apply, []

    def slow(*arguments: Any) -> Any:
        running.append(True)
        time.sleep(0.6)
        running.clear()
        return real(*arguments)

    monkeypatch.setattr(module, "apply", slow)
    async with engine() as (url, asked), pulling(tmp_path, [url]) as ask:
        _, answer = await ask("/pull", {"version": 1, "timeout": 0.1})
        assert answer["message"] == "weight version 1 was not applied and loaded within 0.1 s"
        assert not running  # nobody writes to the copy any more
        assert asked == []
        _, answer = await ask("/pull", {"version": 1})
        assert answer["success"]


async def test_pulls_come_one_after_the_other(tmp_path: Path, writer: DeltaWriter) -> None:
    async with engine() as (url, asked), pulling(tmp_path, [url]) as ask:
        answers = await asyncio.gather(*(ask("/pull", {"version": v}) for v in (1, 2, 2, 1)))
        assert [a["success"] for _, a in answers] == [True, True, True, True]
        assert len(asked) == 4


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ([], "should be an object"),
        ({"version": -1}, "version: Input should be greater than or equal to 0 (-1)"),
        ({"version": 1, "timeout": 0}, "timeout: Input should be greater than 0 (0)"),
        ({"version": 1, "engine_urls": ["http://elsewhere:1"]}, "no engine of this puller: http://elsewhere:1"),
    ],
)
async def test_requests_that_make_no_sense(tmp_path: Path, body: Any, message: str) -> None:
    async with pulling(tmp_path, ["http://127.0.0.1:9"]) as ask:
        status, answer = await ask("/pull", body)
        assert status == 400
        assert message in answer["message"]


async def test_without_engines_of_its_own_a_request_must_name_them(tmp_path: Path, writer: DeltaWriter) -> None:
    async with engine() as (url, asked), pulling(tmp_path, []) as ask:
        status, answer = await ask("/pull", {"version": 1})
        assert status == 400
        assert "engine_urls must name" in answer["message"]
        status, _ = await ask("/pull", {"version": 1, "engine_urls": [url]})
        assert status == 200
        assert len(asked) == 1
