"""Servers of the front in threads of their own, for clients that block: a tiny model's, and a scripted one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slime_embedded.engine.engine import EmbeddedEngine
from slime_serving.front.app import add_front
from slime_serving.front.engine_desk import EngineDesk
from slime_serving.http.application import application, bind, listen
from slime_serving.native import serve_socket

from slime_core import GenerationOutput
from slime_core.config import Args
from tests.agent_toys import StreamingEngine, ToyTokenizer

Served = tuple[str, int, Callable[[], Awaitable[None]]]


class Toy(StreamingEngine):
    """A `StreamingEngine` with what a desk asks of the embedded engine besides."""

    failed = False

    async def info(self) -> dict[str, Any]:
        """As the embedded engine's."""
        return {"model_path": "toy", "max_context_length": 4096}

    async def stream(  # type: ignore[override]
        self, input_ids: Sequence[int], sampling_params: Mapping[str, Any], **kwargs: Any
    ) -> AsyncGenerator[GenerationOutput, None]:
        """Three tokens at a time."""
        async for output in super().stream(input_ids, sampling_params, **kwargs):
            yield output


async def toy(script: Any) -> Served:
    """The front over a scripted engine."""
    engine, app = Toy(script, tokenizer=ToyTokenizer()), application()
    add_front(app, EngineDesk(engine, Args(), "toy"))  # type: ignore[arg-type]
    return await listen(app, bind("127.0.0.1", 0))


async def tiny(directory: Path) -> Served:
    """What `slime serve` serves."""
    engine = EmbeddedEngine(Args(hf_checkpoint=str(directory), num_threads=1), step_in_thread=True)
    await engine.start()
    host, port, stop = await serve_socket(engine, bind("127.0.0.1", 0), "tiny")

    async def end() -> None:
        await stop()
        await engine.stop()

    return host, port, end


@contextmanager
def in_thread(serve: Callable[[], Awaitable[Served]]) -> Iterator[str]:
    """The URL of a server that runs while inside."""
    ready, over = threading.Event(), asyncio.Event()
    found: dict[str, Any] = {}

    async def run() -> None:
        found["loop"] = asyncio.get_running_loop()
        try:
            host, port, stop = await serve()
            found["url"] = f"http://{host}:{port}"
        finally:
            ready.set()
        await over.wait()
        await stop()

    thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
    thread.start()
    assert ready.wait(120)
    assert "url" in found, "the server did not start"
    try:
        yield found["url"]
    finally:
        found["loop"].call_soon_threadsafe(over.set)
        thread.join(60)
        assert not thread.is_alive()
