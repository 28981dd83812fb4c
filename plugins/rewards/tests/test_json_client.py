from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from slime_rewards.remote import JsonClient, json_client
from slime_testing_contracts import Asked, ScriptedService

from slime_core.errors import PluginError


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_client, "FIRST_DELAY_S", 0.001)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def answers(*given: Any) -> Callable[[Asked], Any]:
    rest: Iterator[Any] = iter(given)
    return lambda asked: next(rest)


def post(client: JsonClient, url: str, timeout: float | None = 10.0) -> Any:
    return asyncio.run(client.post(url, {"x": "\u00e9"}, headers={"X-Key": "k"}, timeout=timeout))


def test_posts_json_and_returns_json() -> None:
    with ScriptedService(answers({"y": [1, None]})) as service:
        assert post(JsonClient(), service.url + "/rm") == {"y": [1, None]}
    asked = service.asked[0]
    assert (asked.path, asked.body, asked.headers["x-key"]) == ("/rm", {"x": "\u00e9"}, "k")


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_what_may_pass_is_tried_again(status: int) -> None:
    with ScriptedService(answers((status, {}), (status, b"busy"), 0.5)) as service:
        assert post(JsonClient(), service.url) == 0.5
    assert len(service.asked) == 3


@pytest.mark.parametrize("status", [301, 400, 401, 403, 404, 408, 422])
def test_the_last_word_is_not(status: int) -> None:
    with (
        ScriptedService(answers((status, b"because " + b"x" * 9999))) as service,
        pytest.raises(PluginError, match=rf"^POST http://127\.0\.0\.1:\d+: {status} .*: because x{{192}}$"),
    ):
        post(JsonClient(), service.url)
    assert len(service.asked) == 1


def test_attempts_run_out_with_the_last_reason() -> None:
    with (
        ScriptedService(lambda asked: (503, b"busy")) as service,
        pytest.raises(PluginError, match=r"3 attempts in .* s; last: 503 Service Unavailable: busy$"),
    ):
        post(JsonClient(attempts=3), service.url)
    assert len(service.asked) == 3


def test_refused_connections_are_tried_again(unused_tcp_port: int) -> None:
    with pytest.raises(PluginError, match=r"4 attempts in .*; last: ClientConnectorError"):
        post(JsonClient(attempts=4), f"http://127.0.0.1:{unused_tcp_port}")


def test_the_deadline_is_of_all_attempts_and_of_one_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    with ScriptedService(lambda asked: released.wait(60)) as service:
        started = time.monotonic()
        with pytest.raises(PluginError, match=r"no answer within 0\.3 s \(attempt 1\)"):
            post(JsonClient(), service.url, timeout=0.3)
        assert time.monotonic() - started < 20
        released.set()
    monkeypatch.setattr(json_client, "FIRST_DELAY_S", 60.0)
    monkeypatch.setattr(json_client, "LONGEST_DELAY_S", 60.0)
    with ScriptedService(lambda asked: (500, {})) as service:
        with pytest.raises(PluginError, match="1 attempts"):
            post(JsonClient(), service.url, timeout=20)
        assert time.monotonic() - started < 40


@pytest.mark.parametrize("url", ["ftp://127.0.0.1/", "nonsense", "http://[half"])
def test_no_address(url: str) -> None:
    with pytest.raises(PluginError, match="POST "):
        post(JsonClient(), url)


def test_connections_are_bounded_reused_and_closed_with_the_loop() -> None:
    busy, most, lock = 0, 0, threading.Lock()

    def script(asked: Asked) -> int:
        nonlocal busy, most
        with lock:
            busy += 1
            most = max(most, busy)
        time.sleep(0.005)
        with lock:
            busy -= 1
        return 1

    client = JsonClient(connections=3)

    async def many() -> Any:
        values = await asyncio.gather(*(client.post(service.url, {}) for _ in range(30)))
        return sum(values), client._sessions[asyncio.get_running_loop()][0]

    with ScriptedService(script) as service:
        first = asyncio.run(many())
        assert (first[0], most, service.connections) == (30, 3, 3)
        assert first[1].closed
        second = asyncio.run(many())  # another loop, another session
        assert second[0] == 30
        assert second[1] is not first[1]
    assert client._sessions == {}


def test_proxies_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with ScriptedService(lambda asked: asked.path) as service:
        monkeypatch.setenv("http_proxy", service.url)
        monkeypatch.setenv("no_proxy", "127.0.0.1,inside.example")
        assert post(JsonClient(), "http://outside.example/rm") == "http://outside.example/rm"
        assert post(JsonClient(), service.url + "/rm") == "/rm"
        with pytest.raises(PluginError, match=r"inside\.example"):
            post(JsonClient(attempts=1), "http://inside.example/rm")


@pytest.mark.parametrize("value", [float("nan"), object()])
def test_a_body_that_is_no_json_is_the_callers_mistake(value: Any) -> None:
    with ScriptedService(answers(1)) as service:
        with pytest.raises((TypeError, ValueError), match="JSON"):
            asyncio.run(JsonClient().post(service.url, {"x": value}))
        assert service.asked == []


def test_an_answer_that_breaks_off_is_asked_for_again() -> None:
    async def go() -> tuple[Any, int]:
        asked = 0

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal asked
            await reader.readuntil(b"\r\n\r\n")
            asked += 1
            replies = {1: b"", 2: b"nonsense\r\n\r\n", 3: b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n1"}
            writer.write(replies.get(asked, b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n7"))
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            return await JsonClient().post(f"http://127.0.0.1:{port}", {}, timeout=20), asked

    assert asyncio.run(go()) == (7, 4)
