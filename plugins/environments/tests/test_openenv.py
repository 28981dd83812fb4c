from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from aiohttp import WSMsgType, web
from slime_testing_contracts import EnvironmentContract

from slime_core.errors import EnvironmentTimeoutError, PluginError
from slime_core.protocols.environment import Turn


class Server:
    """A counting game behind OpenEnv's WebSocket messages, and behind POST with episodes; in a thread of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.started = threading.Event()
        self.open = self.resets = self.steps = self.refused = 0
        self.refuse = 0
        self.episodes: dict[str, int] = {}
        self.url = ""
        self.runner: web.AppRunner | None = None
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()
        assert self.started.wait(60)

    def _serve(self) -> None:
        self.loop.run_until_complete(self._start())
        self.started.set()
        self.loop.run_forever()

    async def _start(self) -> None:
        app = web.Application()
        app.add_routes([web.get("/ws", self._ws), web.post("/reset", self._reset), web.post("/step", self._step)])
        self.runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"

    def stop(self) -> None:
        assert self.runner is not None
        asyncio.run_coroutine_threadsafe(self.runner.cleanup(), self.loop).result(60)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(60)
        self.loop.close()

    def _answer(self, count: int, text: str) -> dict[str, Any]:
        return {"observation": {"message": text}, "reward": float(count), "done": count >= 3}

    async def _ws(self, request: web.Request) -> web.StreamResponse:
        if self.refused < self.refuse:
            self.refused += 1
            raise web.HTTPServiceUnavailable
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        self.open += 1
        count = 0
        async for message in socket:
            if message.type != WSMsgType.TEXT:
                break
            told = json.loads(message.data)
            if told["type"] == "reset":
                self.resets += 1
                count = 0
                data = self._answer(0, f"seed {told['data'].get('seed')}")
            elif told["type"] == "step":
                self.steps += 1
                words = told["data"].get("message")
                if words is None:
                    error = {"message": "message: Field required", "code": "VALIDATION_ERROR"}
                    await socket.send_json({"type": "error", "data": error})
                    continue
                if words == "hang":
                    await asyncio.sleep(600)
                if words == "break":
                    error = {"message": "division by zero", "code": "EXECUTION_ERROR"}
                    await socket.send_json({"type": "error", "data": error})
                    continue
                count += 1
                data = self._answer(count, f"heard {words}")
            else:
                break
            await socket.send_json({"type": "observation", "data": data})
        self.open -= 1
        return socket

    async def _reset(self, request: web.Request) -> web.Response:
        if self.refused < self.refuse:
            self.refused += 1
            assert request.transport is not None
            request.transport.close()
        body = await request.json()
        self.resets += 1
        self.episodes[body["episode_id"]] = 0
        return web.json_response(self._answer(0, f"seed {body.get('seed')}"))

    async def _step(self, request: web.Request) -> web.Response:
        self.steps += 1
        body = await request.json()
        if body["action"].get("message") == "break":
            assert request.transport is not None
            request.transport.close()
        self.episodes[body["episode_id"]] += 1
        return web.json_response(self._answer(self.episodes[body["episode_id"]], f"heard {body['action']['message']}"))


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.stop()


class _OpenEnv(EnvironmentContract):
    component = "openenv"
    actions = ("a", "b", "c")
    ends = True
    transport = "websocket"

    @pytest.fixture(autouse=True)
    def _served(self, server: Server) -> None:
        self.server = server
        self.own: dict[str, Any] = {"url": server.url, "transport": self.transport}

    @property
    def settings(self) -> Any:
        settings = super().settings
        settings.plugins = {"openenv": self.own}
        return settings


class TestOverWebSocket(_OpenEnv):
    component = "openenv"

    def test_steps_are_of_one_session(self) -> None:
        first, steps = self.play(("a", "b", "c"))
        assert first == "seed 7"
        assert [step.observation for step in steps] == ["heard a", "heard b", "heard c"]
        assert [step.reward for step in steps] == [1.0, 2.0, 3.0]
        assert [step.done for step in steps] == [False, False, True]

    def test_what_the_server_does_not_take_is_told(self) -> None:
        self.own["action_field"] = ""
        _, (text, wrong, right) = self.play(("a", '{"other": 1}', '{"message": "x"}'))
        assert text.observation == "Write the action as one JSON object."
        assert "message: Field required" in str(wrong.observation)
        assert right.observation == "heard x"

    def test_an_error_of_the_server_is_raised(self) -> None:
        with pytest.raises(PluginError, match="EXECUTION_ERROR: division by zero"):
            self.play(("break",))
        assert self.server.steps == 1

    def test_connecting_is_tried_again(self) -> None:
        self.server.refuse = 2
        self.play(("a",))
        assert self.server.refused == 2
        self.server.refuse = 5
        with pytest.raises(PluginError, match="OpenEnv server"):
            self.play(("a",))

    @pytest.mark.slow
    async def test_a_step_that_hangs_ends_and_its_session_too(self) -> None:
        sample = self.sample()
        session = await self.open(sample)
        await session.reset(sample)
        session._step_timeout = 2.0
        with pytest.raises(EnvironmentTimeoutError):
            await session.step("hang", Turn(0, "hang", [], "stop"))
        await session.close()
        await asyncio.sleep(0)
        assert self.server.steps == 1, "never tried again"


class TestOverHttp(_OpenEnv):
    component = "openenv"
    transport = "http"

    def test_an_episode_is_kept_by_its_id(self) -> None:
        _, steps = self.play(("a", "b", "c"))
        assert [step.reward for step in steps] == [1.0, 2.0, 3.0]
        assert len(self.server.episodes) == 1

    def test_a_reset_is_tried_again_and_a_step_is_not(self) -> None:
        self.server.refuse = 1
        self.play(("a",))
        steps = self.server.steps
        with pytest.raises(PluginError):
            self.play(("break",))
        assert self.server.steps == steps + 1
