"""Run an ASGI application inside an aiohttp application: `BaseAdapter.app` is aiohttp's, as in THUDM/slime."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web


def aiohttp_application(asgi: Any, largest_body: int) -> web.Application:
    """Return an aiohttp application that passes every request to `asgi`; cancelling the handler cancels the call."""

    async def handle(request: web.Request) -> web.StreamResponse:
        url, response = request.rel_url, web.StreamResponse()
        left = [{"type": "http.request", "body": await request.read(), "more_body": False}]

        async def receive() -> dict[str, Any]:
            return left.pop() if left else await asyncio.get_running_loop().create_future()

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                response.set_status(message["status"])
                for name, value in message["headers"]:
                    response.headers.add(name.decode("latin-1"), value.decode("latin-1"))
                await response.prepare(request)
                return
            await response.write(message.get("body", b""))
            if not message.get("more_body", False):
                await response.write_eof()

        scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1",
            "method": request.method, "scheme": request.scheme, "path": url.path, "root_path": "",
            "raw_path": url.raw_path.encode(), "query_string": url.raw_query_string.encode(),
            "headers": [(name.lower(), value) for name, value in request.raw_headers],
            "client": None, "server": None, "state": {},
        }  # fmt: skip
        await asgi(scope, receive, send)
        return response

    app = web.Application(client_max_size=largest_body)
    app.router.add_route("*", "/{path:.*}", handle)
    return app
