"""`slime.agent.aiohttp_threaded`: an aiohttp application in an event loop on a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from aiohttp.web_log import AccessLogger

from slime import _missing

_DEADLINE = 30.0
"""Seconds to listen, and to stop."""
_LATE = 5.0
"""Seconds that what is left gets to end by itself."""


class FilteredAccessLogger(AccessLogger):
    """Logs refused requests and those that took long."""

    slow = 120.0
    """Seconds."""

    def log(self, request: web.BaseRequest, response: web.StreamResponse, time: float) -> None:
        """One line for what is worth it."""
        if response.status >= 400 or time > self.slow:
            super().log(request, response, time)


@dataclass
class AppHandle:
    """A running application."""

    host: str
    port: int
    """That it listens on; the one asked for, or a free one for 0."""
    loop: asyncio.AbstractEventLoop
    thread: threading.Thread
    runner: web.AppRunner

    @property
    def url(self) -> str:
        """Of this machine."""
        return f"http://{'127.0.0.1' if self.host in ('0.0.0.0', '::') else self.host}:{self.port}"

    def stop(self) -> None:
        """Stop listening, end the loop; safe to call twice."""
        if self.loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._end(), self.loop).result(_DEADLINE)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(_DEADLINE)
        self.loop.close()

    async def _end(self) -> None:
        await self.runner.cleanup()
        others = asyncio.all_tasks() - {asyncio.current_task()}  # requests to the engine that are being ended
        if others:
            _, late = await asyncio.wait(others, timeout=_LATE)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        await self.loop.shutdown_asyncgens()


def run_app_in_thread(
    app: web.Application,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    thread_name: str = "aiohttp-app",
    runner_kwargs: Mapping[str, Any] | None = None,
) -> AppHandle:
    """Listen on `host:port`, and go on.

    Args:
        app: Of `adapter.app`, or any.
        host: Address of this machine.
        port: 0 takes a free one.
        thread_name: Of the daemon thread.
        runner_kwargs: For `aiohttp.web.AppRunner`; a client that goes away cancels its request unless told otherwise.

    Raises:
        OSError: The address cannot be had.
    """
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name=thread_name, daemon=True)
    thread.start()
    runner = web.AppRunner(app, **{"handler_cancellation": True, **(runner_kwargs or {})})

    async def listen() -> int:
        await runner.setup()
        await web.TCPSite(runner, host, port).start()
        return int(runner.addresses[0][1])

    listening = asyncio.run_coroutine_threadsafe(listen(), loop)
    try:
        return AppHandle(host, listening.result(_DEADLINE), loop, thread, runner)
    except BaseException:
        AppHandle(host, port, loop, thread, runner).stop()
        raise


__all__ = ["AppHandle", "FilteredAccessLogger", "run_app_in_thread"]
__getattr__ = _missing.names(__name__)
