"""Connections of the server: headers have a deadline, and waiting connections are closed when places run out.

uvicorn makes a `Connection` of every socket that it accepts (`application.listen`). Its own limit counts connections
and refuses requests, so a few thousand sockets that never finish their headers or a body, or stay open after one
answer, would shut everyone else out.
"""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

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
