"""An engine to talk to, and the settings of a run."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from slime.rollout import rm_hub
from slime.utils.misc import SingletonMeta
from slime_commands.init.tiny_model import write_tokenizer


class Engine(ThreadingHTTPServer):
    """SGLang's `/generate` with as many tokens "7" as asked for; `hold` keeps requests until they are aborted."""

    request_queue_size = 256

    daemon_threads = True

    def __init__(self, token: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.token = token
        self.requests: list[tuple[str, Any, dict[str, str]]] = []
        self.refusals: list[int] = []
        """Status codes of the next answers."""
        self.hold = False
        self.arrived = threading.Semaphore(0)
        self.released = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def bodies(self, path: str) -> list[Any]:
        return [body for asked, body, _ in self.requests if asked == path]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Engine

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((self.path, body, dict(self.headers)))
        if self.server.refusals:
            self.answer(self.server.refusals.pop(0), {"error": {"message": "not now"}})
        elif self.path == "/abort_request":
            self.server.released.set()
            self.answer(200, {})
        elif self.path == "/rm":
            self.answer(200, 0.5)
        elif self.path == "/generate":
            self.generate(body)
        else:
            self.answer(200, {"echo": body})

    def do_GET(self) -> None:
        self.server.requests.append((self.path, None, dict(self.headers)))
        self.answer(*((404, {}) if "workers" in self.path else (200, {"path": self.path})))

    def generate(self, body: dict[str, Any]) -> None:
        self.server.arrived.release()
        held = self.server.hold and not self.server.released.is_set()
        if body.get("stream"):
            return self.stream(min(int(body["sampling_params"]["max_new_tokens"]), 4), held)
        if held:
            assert self.server.released.wait(30)
        number = 1 if held else min(int(body["sampling_params"]["max_new_tokens"]), 4)
        meta = {
            "finish_reason": {"type": "abort" if held else "stop"},
            "weight_version": "3",
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": number,
            "output_token_logprobs": [[-0.25, self.server.token, None]] * number,
        }
        self.answer(200, {"text": "7" * number, "meta_info": meta})

    def stream(self, number: int, held: bool) -> None:
        """Cumulative events of a token each; with `hold` the second is the last one for a while."""
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        for count in range(1, number + 1):
            entries = [[-0.25, self.server.token, None]] * count
            meta: dict[str, Any] = {"output_token_logprobs": entries, "weight_version": "3"}
            meta |= {"finish_reason": {"type": "stop"} if count == number else None}
            self.wfile.write(b"data: " + json.dumps({"text": "7" * count, "meta_info": meta}).encode() + b"\n\n")
            self.wfile.flush()
            if held and count == 2:
                self.server.arrived.release()
                assert self.server.released.wait(30)
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def answer(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        """Silent."""


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory)
    return directory


@pytest.fixture(scope="session")
def tokenizer(model_dir: Path) -> Any:
    from slime_core.data.tokenizer import load_tokenizer

    return load_tokenizer(model_dir)


@pytest.fixture
def engine(tokenizer: Any) -> Iterator[Engine]:
    server = Engine(tokenizer.encode("7", add_special_tokens=False)[0])
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.released.set()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"q": f"{i}+{i}=?", "a": str(2 * i)}) + "\n" for i in range(10)))
    return path


@pytest.fixture
def make_args(engine: Engine, model_dir: Path, data: Path) -> Iterator[Callable[..., Any]]:
    """Settings of a run against `engine`; a process has one run, so what is kept per process is forgotten around it."""

    def make(**changes: Any) -> Any:
        from slime_core.config import load_settings

        flags: dict[str, Any] = {
            "hf_checkpoint": model_dir, "prompt_data": data, "input_key": "q", "label_key": "a",
            "rollout_batch_size": 2, "n_samples_per_prompt": 2, "num_rollout": 1, "rollout_max_response_len": 8,
            "rm_type": "exact", "sglang_router_ip": "127.0.0.1", "sglang_router_port": engine.server_port,
            "rollout_engine": "http", "rollout_timeout": 30, **changes,
        }  # fmt: skip
        argv: list[str] = []
        for name, value in flags.items():
            if value is not None and value is not False:
                values = [] if value is True else value if isinstance(value, list) else [value]
                argv += [f"--{name.replace('_', '-')}", *map(str, values)]
        return load_settings(argv, env={}).args

    forget()
    yield make
    forget()


def forget() -> None:
    SingletonMeta.clear_all_instances()
    rm_hub._CALLERS.clear()
