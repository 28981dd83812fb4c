"""Real servers and a small router in processes of their own that start in a fraction of a second, to kill and freeze.

A fork server imports torch and the embedded engine once; each server is a fork of it that runs what `slime serve` runs.
All have the methods that the supervisor asks of a process.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import random
import signal
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from slime_core.config import Args
from slime_core.errors import EngineError

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(
    [
        "slime_embedded.engine.loading",
        "slime_serving.native",
        "transformers.models.auto",
        "transformers.tokenization_utils_tokenizers",
        "transformers.models.auto.tokenization_auto",
    ]
)


_JSON = {"content-type": "application/json"}
_START_S, _GONE_S = 180.0, 60.0
"""For the imports of the first one, and for a signal to have its effect, on a machine with much else to do."""


def _serve(model: str, port: int, told: Any) -> None:
    import torch
    from slime_embedded.engine.engine import EmbeddedEngine
    from slime_serving.native import serve_in_loop

    torch.set_num_threads(1)

    async def serve() -> None:
        engine = EmbeddedEngine(Args(hf_checkpoint=model, num_threads=1), step_in_thread=True)
        await engine.start()
        told.send((await serve_in_loop(engine, "127.0.0.1", port))[1])
        await asyncio.Event().wait()

    asyncio.run(serve())


def _route(_: str, port: int, told: Any) -> None:
    """A router with the API of sglang-router 0.3 that the engine uses; sends each request to a random worker."""
    import aiohttp
    from aiohttp import web

    workers: dict[str, str] = {}

    async def listing(_: web.Request) -> web.Response:
        entries = [{"id": name, "url": url, "is_healthy": True} for name, url in workers.items()]
        return web.json_response({"workers": entries})

    async def add(request: web.Request) -> web.Response:
        url = (await request.json())["url"]
        if url in workers.values():
            return web.json_response({"error": "there already"}, status=409)
        workers[f"w{len(workers)}-{time.monotonic_ns()}"] = url
        return web.json_response({}, status=202)

    async def remove(request: web.Request) -> web.Response:
        workers.pop(request.match_info["name"], None)
        return web.json_response({}, status=202)

    async def generate(request: web.Request) -> web.Response:
        for url in random.sample(sorted(workers.values()), len(workers)):
            try:
                async with (
                    aiohttp.ClientSession() as session,
                    session.post(url + "/generate", data=await request.read(), headers=_JSON) as answer,
                ):
                    return web.Response(status=answer.status, body=await answer.read(), content_type="application/json")
            except aiohttp.ClientError:
                continue
        return web.json_response({"error": "no_available_workers"}, status=503)

    async def healthy(_: web.Request) -> web.Response:
        return web.Response(text="OK")

    async def serve() -> None:
        app = web.Application()
        app.add_routes([web.get("/workers", listing), web.post("/workers", add), web.delete("/workers/{name}", remove)])
        app.add_routes([web.post("/generate", generate), web.get("/health", healthy), web.get("/liveness", healthy)])
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", port, reuse_address=True)
        await site.start()
        told.send(runner.addresses[0][1])
        await asyncio.Event().wait()

    asyncio.run(serve())


class ForkedProcess:
    """Runs `target(argument, port, pipe)`; with `keep_port` every start listens where the first one did."""

    def __init__(self, name: str, target: Callable[..., None], argument: str, *, keep_port: bool = True) -> None:
        self.name = name
        self.starts = 0
        self.refuse = ""
        """When set, `start` raises it."""
        self._target = target
        self._argument = argument
        self._keep_port = keep_port
        self._port = 0
        self._process: Any = None
        self._told: Any = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.is_alive()

    @property
    def pid(self) -> int:
        pid: int = self._process.pid
        return pid

    def last_words(self) -> str:
        code = self._process.exitcode
        return "is running" if code is None else f"was ended by signal {-code}" if code < 0 else f"exited with {code}"

    def start(self) -> None:
        if self.refuse:
            raise EngineError(self.refuse)
        assert not self.alive, "two servers at once"
        self.starts += 1
        self._told, theirs = _FORKS.Pipe()
        port = self._port if self._keep_port else 0
        self._process = _FORKS.Process(target=self._target, args=(self._argument, port, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def wait(self) -> None:
        """Until it serves."""
        try:
            if not self._told.poll(_START_S):
                raise EngineError(f"{self.name} did not start within {_START_S:.0f} s")
            self._port = self._told.recv()
        except (EOFError, OSError):
            raise EngineError(f"{self.name} {self.last_words()}") from None

    async def restart(self) -> None:
        await asyncio.to_thread(self._restart)

    def _restart(self) -> None:
        self.kill()
        self.start()
        try:
            self.wait()
        except EngineError:  # somebody else has the port
            self.kill()
            self._port = 0
            self.start()
            self.wait()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join(_GONE_S)
            assert not self._process.is_alive()

    def send(self, number: int) -> None:
        os.kill(self.pid, number)

    def freeze(self) -> None:
        """SIGSTOP, and wait until the kernel has done it."""
        self.send(signal.SIGSTOP)
        deadline = time.monotonic() + _GONE_S
        while Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def post(self, path: str, body: Any) -> Any:
        """As an outsider would."""
        data = json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, _JSON)
        with urllib.request.urlopen(request, timeout=30) as answer:
            text = answer.read()
        return json.loads(text) if text.startswith(b"{") else None

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=30) as answer:
            return json.loads(answer.read())


class EmbeddedServer(ForkedProcess):
    """`slime serve`, as far as HTTP goes."""

    def __init__(self, name: str, model: Path, *, keep_port: bool = True) -> None:
        super().__init__(name, _serve, str(model), keep_port=keep_port)


class SmallRouter(ForkedProcess):
    """A router; it knows nobody when it starts."""

    def __init__(self, name: str = "router") -> None:
        super().__init__(name, _route, "")

    def start_with(self, urls: Sequence[str]) -> None:
        """Its policy needs none."""

    def workers(self) -> set[str]:
        return {entry["url"] for entry in self.get("/workers")["workers"]}
