"""Servers in the test's own event loop that answer as SGLang does, or as SGLang does when something goes wrong."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from slime_engine_http.api.engine import HttpEngine
from slime_engine_http.api.worker import WorkerPool

from slime_core.config import Args

Reaction = Callable[["Server", web.Request, Any, int], Awaitable[Any]]
"""(server, request, its JSON, how many came to this path before) -> JSON, (status, JSON or bytes), or a response."""


def answer(*ids: int, version: str | None = None, reason: str = "length", **meta: Any) -> dict[str, Any]:
    """SGLang's answer with these tokens, each of log-prob -0.5."""
    meta_info = {
        "id": "r", "finish_reason": {"type": reason}, "prompt_tokens": 1, "completion_tokens": len(ids),
        "output_token_logprobs": [[-0.5, i, None] for i in ids],
    }  # fmt: skip
    if version is not None:
        meta_info["weight_version"] = version
    return {"text": "x" * len(ids), "output_ids": list(ids), "meta_info": meta_info | meta}


async def well(server: Server, request: web.Request, body: Any, before: int) -> Any:
    """Everything as it should be; the token is the server's number."""
    if request.path == "/generate":
        return answer(server.number)
    return {"success": True, "weight_version": "1"}


def generating(reaction: Reaction) -> Reaction:
    """`well`, but for /generate."""

    async def react(server: Server, request: web.Request, body: Any, before: int) -> Any:
        return await (reaction if request.path == "/generate" else well)(server, request, body, before)

    return react


async def die(server: Server, request: web.Request, body: Any, before: int) -> Any:
    """Break the connection in the middle of a request."""
    assert request.transport is not None
    request.transport.abort()
    return {}


async def hang(server: Server, request: web.Request, body: Any, before: int) -> Any:
    """Until the test is over."""
    await asyncio.sleep(600)
    return {}


async def sse(
    request: web.Request, *events: Any, end: bool = True, last: Awaitable[Any] | None = None
) -> web.StreamResponse:
    """Send events, then wait for `last`; without `end` the connection breaks after them."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for event in events:
        await response.write(b"data: " + (event if isinstance(event, bytes) else json.dumps(event).encode()) + b"\n\n")
        await asyncio.sleep(0.01)
    if last is not None:
        await last
    if not end:
        assert request.transport is not None
        request.transport.abort()
    else:
        await response.write(b"data: [DONE]\n\n")
    return response


class Server:
    """Follows `react`; `calls` is what it was asked, as (path, JSON, headers)."""

    def __init__(self, react: Reaction, number: int) -> None:
        self.react = react
        self.number = number
        self.calls: list[tuple[str, Any, dict[str, str]]] = []
        self.url = ""
        self.runner: web.AppRunner | None = None

    @property
    def address(self) -> str:
        """HOST:PORT."""
        return self.url.removeprefix("http://")

    def asked(self, path: str) -> list[Any]:
        """The bodies of the calls to `path`."""
        return [body for p, body, _ in self.calls if p == path]

    async def start(self) -> None:
        """Listen."""
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._handle)
        self.runner = web.AppRunner(app, shutdown_timeout=0.01, access_log=None)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        self.url = "http://127.0.0.1:{1}".format(*self.runner.addresses[0][:2])

    async def stop(self) -> None:
        """End: connections break, and nobody listens any more."""
        runner, self.runner = self.runner, None
        if runner is not None:
            await runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        body = json.loads(raw) if raw else None
        before = len(self.asked(request.path))
        self.calls.append((request.path_qs, body, {k.lower(): v for k, v in request.headers.items()}))
        given = await self.react(self, request, body, before)
        if isinstance(given, web.StreamResponse):
            return given
        status, value = given if isinstance(given, tuple) else (200, given)
        if isinstance(value, bytes):
            return web.Response(body=value, status=status, content_type="text/plain")
        return web.json_response(value, status=status)


@asynccontextmanager
async def servers(*reactions: Reaction) -> AsyncIterator[list[Server]]:
    """One server per reaction, numbered from 0."""
    made = [Server(reaction, number) for number, reaction in enumerate(reactions)]
    try:
        for server in made:
            await server.start()
        yield made
    finally:
        for server in made:
            await server.stop()


def await_all(pool: WorkerPool, wait: bool = True) -> None:
    """What is out comes back, as far as the client knows."""
    for worker in pool.workers:
        worker.awaited = wait


@asynccontextmanager
async def engine_at(*made: Server, **args: Any) -> AsyncIterator[HttpEngine]:
    """A started engine over these servers; nobody brings them back, but for the test."""
    engine = HttpEngine(Args(rollout_external_engine_addrs=[s.address for s in made], **args))
    await engine.start()
    assert engine._supervisor is not None
    engine._supervisor.stop()
    try:
        yield engine
    finally:
        await engine.stop()
