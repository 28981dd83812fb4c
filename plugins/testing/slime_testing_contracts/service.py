"""An HTTP service that follows a script, for testing rewards and tools that call a service.

It runs in a thread of the test's process, on its own port, for the length of a `with` block.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple


class Asked(NamedTuple):
    """A request that arrived."""

    path: str
    body: Any
    """Decoded JSON body."""
    headers: Mapping[str, str]
    """Headers by lower-case name."""


Script = Callable[[Asked], Any]


class ScriptedService:
    """`with ScriptedService(script) as service: ... service.url`; `service.asked` lists the requests in order.

    The script returns the value to send as JSON, or (status, JSON), or (status, bytes). It may block: every request has
    a thread of its own.
    """

    def __init__(self, script: Script) -> None:
        self.asked: list[Asked] = []
        self.connections = 0
        """Number of opened connections."""
        self._script = script
        self._server = _Server(("127.0.0.1", 0), _handler(self))
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    @property
    def url(self) -> str:
        """`http://127.0.0.1:PORT`."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def answer(self, asked: Asked) -> tuple[int, bytes]:
        """Return status and body for a request."""
        self.asked.append(asked)
        given = self._script(asked)
        status, value = given if isinstance(given, tuple) else (200, given)
        return status, value if isinstance(value, bytes) else json.dumps(value).encode()

    def __enter__(self) -> ScriptedService:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    # With the standard library's 5, the kernel drops simultaneous connections, and their clients wait for seconds.
    request_queue_size = 256


def _handler(service: ScriptedService) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # Head and body in one packet: in two, the second waits 40 ms for the acknowledgement of the first.
        wbufsize = -1
        disable_nagle_algorithm = True

        def setup(self) -> None:
            service.connections += 1
            super().setup()

        def do_POST(self) -> None:
            raw = self.rfile.read(int(self.headers.get("content-length", 0)))
            headers = {name.lower(): value for name, value in self.headers.items()}
            status, body = service.answer(Asked(self.path, json.loads(raw or b"null"), headers))
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    return Handler
