"""Create the FastAPI application that routes are added to, and the socket it listens on.

`application` adds the guard, the error shapes and `/openapi.json`; `listen` serves it in the running event loop.

Connections of the server: headers have a deadline, and waiting connections are closed when places run out.

uvicorn makes a `Connection` of every socket that it accepts (`application.listen`). Its own limit counts connections
and refuses requests, so a few thousand sockets that never finish their headers or a body, or stay open after one
answer, would shut everyone else out.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import h11
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from uvicorn.protocols.http.h11_impl import H11Protocol

import slime_core
from slime_core.errors import EngineError
from slime_serving.http.errors import ClientGone, Refused, explain, sglang_shape, shape_of
from slime_serving.http.guard import Access, Guard
from slime_serving.http.streams import json_response

_BACKLOG = 2048
_ACCEPTED_AT_ONCE = 16
"""Connections accepted in a turn of the event loop: asyncio would accept as many as wait, before any is closed."""
_KEEP_ALIVE_S = 600
"""Seconds to keep idle connections: with uvicorn's 5 s they would be closed while the loop trains."""
_CONNECTIONS = 4096
_FILES_LEFT = 128
"""Number of descriptors reserved for the rest of the process."""


def application(access: Access | None = None, *, failed: Callable[[], bool] = lambda: False) -> FastAPI:
    """Return an application whose only route is `/openapi.json`.

    Args:
        access: Clients that may connect; None: this machine.
        failed: Function that returns whether the served engine has stopped, so that errors become 503.
    """
    app = FastAPI(title="slime", version=slime_core.__version__, docs_url=None, redoc_url=None)
    app.state.error_shapes = {"": sglang_shape}
    app.state.refuses = lambda request, body, errors: Refused(400, explain(errors))

    def refused(path: str, status: int, message: str) -> Response:
        # Clients of both vendors retry 408, 409, 429 and 5xx unless told; what is refused here stays refused.
        return json_response(shape_of(app, path)(status, message), status, {"x-should-retry": "false"})

    app.add_middleware(
        Guard, access=access or Access(), refuse=lambda path, error: refused(path, error.status, str(error))
    )

    @app.exception_handler(RequestValidationError)
    async def malformed(request: Request, error: RequestValidationError) -> Response:
        problem = app.state.refuses(request, error.body, error.errors())
        return refused(request.url.path, problem.status, str(problem))

    @app.exception_handler(EngineError)
    async def mistaken(request: Request, error: EngineError) -> Response:
        return refused(request.url.path, 503 if failed() else 400, str(error))

    @app.exception_handler(Refused)
    async def not_served(request: Request, error: Refused) -> Response:
        return refused(request.url.path, error.status, str(error))

    @app.exception_handler(HTTPException)
    async def no_route(request: Request, error: HTTPException) -> Response:
        known = {404: f"there is no {request.method} {request.url.path[:80]}", 405: "another method is needed here"}
        return refused(request.url.path, error.status_code, known.get(error.status_code, str(error.detail)))

    @app.exception_handler(ClientGone)
    async def nobody_waits(request: Request, error: ClientGone) -> Response:
        return Response(status_code=499)

    return app


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0 picks a free port. Raises EngineError if the address cannot be bound."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With an explicit protocol asyncio sets TCP_NODELAY; otherwise an answer in two pieces may wait 40 ms in between.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(_BACKLOG)
    except (OSError, OverflowError) as error:
        sock.close()
        raise EngineError(
            f"cannot listen on {host}:{port} ({error}); choose another --port, 0 for a free one"
        ) from error
    sock.set_inheritable(True)
    return sock


async def listen(app: FastAPI, sock: socket.socket) -> tuple[str, int, Callable[[], Awaitable[None]]]:
    """Serve in the running loop.

    Returns:
        The host and port bound, and a coroutine function that stops serving and closes the socket.
    """
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    config = uvicorn.Config(
        app, http=Connection,  # by h11, which limits headers: httptools accepted 4 MB
        log_level="warning", access_log=False, proxy_headers=False, lifespan="off", backlog=_ACCEPTED_AT_ONCE,
        timeout_keep_alive=_KEEP_ALIVE_S, limit_concurrency=max(min(_CONNECTIONS, files - _FILES_LEFT), 16),
    )  # fmt: skip
    server = _Server(config)
    task = asyncio.create_task(server.serve(sockets=[sock]), name="slime-http-server")
    while not server.started:
        if task.done():
            await task
        await asyncio.sleep(0.005)
    sock.listen(_BACKLOG)  # asyncio took `backlog` for the kernel's queue as well
    host, port = sock.getsockname()[:2]

    async def stop() -> None:
        server.should_exit = True
        server.force_exit = True
        await task
        sock.close()

    return str(host), int(port), stop


class _Server(uvicorn.Server):
    """A server that leaves signal handling to the owner of the event loop."""

    def capture_signals(self) -> Any:
        """Install no signal handlers."""
        return contextlib.nullcontext()


HEADERS_S = 10.0
"""Seconds for the headers of a request, from the first byte, or the connection's beginning, on."""
_SPARE = 1 / 8
"""Share of the places that is kept free by closing others: the task of a closed one lasts a few turns of the loop."""
_CLOSED_AT_ONCE = 16
"""Connections closed when places run out; they are sorted each time."""
_FRESH_S = 1.0
"""Seconds before a connection without a whole request is among the first to be closed; its bytes may be unread."""
_LATE = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class Connection(H11Protocol):
    """Connection of one client."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self._headers_timer: asyncio.TimerHandle | None = None
        self._since = self.loop.time()
        """When it was made, or its last answer was sent."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for headers; close others where places run out."""
        super().connection_made(transport)
        self._await_headers()
        if self.limit_concurrency is not None and len(self.connections) > self.limit_concurrency * (1 - _SPARE):
            others = [c for c in self.connections if isinstance(c, Connection) and c is not self and c._waits]
            late = self.loop.time() - _FRESH_S
            for other in sorted(others, key=lambda c: (c._is_whole or c._since > late, c._since))[:_CLOSED_AT_ONCE]:
                other.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the deadline."""
        self._headers_came()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Start the deadline of headers when bytes come between two requests."""
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:
            self._await_headers()

    def handle_events(self) -> None:
        """Read what there is; a request that has begun behind another has a deadline as well."""
        super().handle_events()
        if self.conn.their_state is not h11.IDLE:
            self._headers_came()
        elif self.conn.trailing_data[0]:
            self._await_headers()

    def on_response_complete(self) -> None:
        """Note when."""
        self._since = self.loop.time()
        super().on_response_complete()

    @property
    def _waits(self) -> bool:
        """No request is being answered."""
        waits = not self._is_whole or (self.cycle is not None and self.cycle.response_complete)
        return waits and not self.transport.is_closing()

    @property
    def _is_whole(self) -> bool:
        """Headers and body of the last request have arrived."""
        return self.cycle is not None and self.conn.their_state is not h11.SEND_BODY

    def _await_headers(self) -> None:
        if self._headers_timer is None and not self.transport.is_closing():
            self._headers_timer = self.loop.call_later(HEADERS_S, self._late)

    def _headers_came(self) -> None:
        if self._headers_timer is not None:
            self._headers_timer.cancel()
            self._headers_timer = None

    def _late(self) -> None:
        self._headers_timer = None
        if self.conn.trailing_data[0]:
            self.transport.write(_LATE)
        self.transport.close()
