"""The engine of `--rollout-engine http`, in front of an embedded engine's server on a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import ClassVar

import pytest
from slime_embedded.engine.engine import EmbeddedEngine
from slime_testing_contracts import EngineContract
from slime_testing_contracts.tiny import tiny_model

from slime_core.config.schema import Args


class Server(threading.Thread):
    """Serves until told to stop."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.ready = threading.Event()
        self.address = ("", 0)

    def run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        engine = EmbeddedEngine(Args(hf_checkpoint=str(tiny_model())))
        await engine.start()
        self.address = await engine.address()
        self.ready.set()
        await self._over.wait()
        await engine.stop()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self.join(60)
        assert not self.is_alive()


@pytest.mark.slow
class TestHttp(EngineContract):
    component = "http"
    address: ClassVar[tuple[str, int]]

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _served(cls) -> Iterator[None]:
        server = Server()
        server.start()
        assert server.ready.wait(60)
        cls.address = server.address
        yield
        server.stop()

    @property
    def settings(self) -> SimpleNamespace:
        settings = super().settings
        settings.sglang_router_ip, settings.sglang_router_port = self.address
        return settings
