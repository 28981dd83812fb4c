"""A teacher to talk to."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest


class Teacher(ThreadingHTTPServer):
    """Scores token t with -t / 10, after refusing `failures` requests."""

    request_queue_size = 256

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.failures = 0
        self.requests: list[Any] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Teacher

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((self.path, body))
        refused = self.server.failures > 0
        self.server.failures -= refused
        scored = [[None if i == 0 else -t / 10, t, None] for i, t in enumerate(body["input_ids"])]
        answer = json.dumps({"text": "", "meta_info": {"input_token_logprobs": scored}}).encode()
        self.send_response(503 if refused else 200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *args: Any) -> None:
        """Silent."""


@pytest.fixture
def teacher() -> Iterator[Teacher]:
    server = Teacher()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()
