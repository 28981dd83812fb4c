"""A teacher to talk to."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest


class Teacher(ThreadingHTTPServer):
    """Scores token t with -t / 10, after refusing `failures` requests; the likeliest tokens are 0, 1, ...

    It answers /generate as SGLang does, and /v1/completions as vLLM does.
    """

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
        answer = json.dumps(_completion(body) if "prompt" in body else _generated(body)).encode()
        self.send_response(503 if refused else 200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *args: Any) -> None:
        """Silent."""


def _generated(body: dict[str, Any]) -> dict[str, Any]:
    ids = body["input_ids"][body["logprob_start_len"] :]
    meta = {"input_token_logprobs": [[None if i == 0 else -t / 10, t, None] for i, t in enumerate(ids)]}
    if number := body.get("top_logprobs_num"):
        top = [[-t / 10, t, None] for t in range(number)]
        meta["input_top_logprobs"] = [None if i == 0 else top for i in range(len(ids))]
    return {"text": "", "meta_info": meta}


def _completion(body: dict[str, Any]) -> dict[str, Any]:
    def row(token: int) -> dict[str, Any]:
        shown = [token, *(t for t in range(body["prompt_logprobs"]) if t != token)]
        return {str(t): {"logprob": -t / 10, "rank": t + 1, "decoded_token": "?"} for t in shown}

    return {"choices": [{"text": "", "prompt_logprobs": [None, *map(row, body["prompt"][1:])]}]}


@pytest.fixture
def teacher() -> Iterator[Teacher]:
    server = Teacher()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()
