"""`slime.agent.aiohttp_threaded`: an aiohttp application in an event loop on its own thread."""

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
"""Deadline in seconds for starting to listen, and for stopping."""
_LATE = 5.0
"""Seconds within which remaining tasks may end by themselves."""


class FilteredAccessLogger(AccessLogger):
    """A logger of refused and slow requests."""

    slow = 120.0
    """Duration of a slow request, in seconds."""

    def log(self, request: web.BaseRequest, response: web.StreamResponse, time: float) -> None:
        """Log a request that was refused or slow."""
        if response.status >= 400 or time > self.slow:
            super().log(request, response, time)


@dataclass
class AppHandle:
    """A running application."""

    host: str
    port: int
    """Port that the application listens on: the requested port, or a free port if 0 was requested."""
    loop: asyncio.AbstractEventLoop
    thread: threading.Thread
    runner: web.AppRunner

    @property
    def url(self) -> str:
        """URL of the application on this machine."""
        return f"http://{'127.0.0.1' if self.host in ('0.0.0.0', '::') else self.host}:{self.port}"

    def stop(self) -> None:
        """Stop listening and end the loop; safe to call twice."""
        if self.loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._end(), self.loop).result(_DEADLINE)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(_DEADLINE)
        self.loop.close()

    async def _end(self) -> None:
        await self.runner.cleanup()
        others = asyncio.all_tasks() - {asyncio.current_task()}  # engine requests that are ending
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
    """Serve an application on `host:port` in a thread, and return when it listens.

    Args:
        app: `adapter.app`, or any application.
        host: Address of this machine.
        port: Port to listen on; 0 takes a free port.
        thread_name: Name of the daemon thread.
        runner_kwargs: Arguments for `aiohttp.web.AppRunner`; by default a client that disconnects cancels its request.

    Raises:
        OSError: The address is not available.
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
