"""The host of an engine under test: a separate event loop in a thread, from the first use until the test class ends.

`EngineCase.run` uses it. An engine that takes half a minute to start is started once for a whole class. Its loop keeps
running between two tests, as between two rollouts. As in the rollout stage, an engine is built, started, used and
stopped in the same loop.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

T = TypeVar("T")


class EngineHost:
    """A host of one engine at a time."""

    def __init__(self) -> None:
        self.engine: Any = None
        self.version = 0
        """Version of the last pushed weights."""
        self.changed = False
        """Whether the engine serves other weights than its checkpoint's."""
        self.transports: dict[str, Any] = {}
        """Transports by name, kept because the directory of versions has a single writer."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def use(
        self, build: Callable[[], Any], use: Callable[[Any], Awaitable[T]], *, deadline: float, start_deadline: float
    ) -> T:
        """Call `use` with the engine; build and start the engine if it does not exist yet.

        An engine is discarded after a failure, since its state is unknown. Deadlines are in seconds.
        """
        if self.engine is None:
            self.engine = self.call(lambda: _started(build()), start_deadline)
        try:
            return self.call(lambda: use(self.engine), deadline)
        except Exception:
            self.discard(start_deadline)
            raise

    def call(self, use: Callable[[], Awaitable[T]], deadline: float) -> T:
        """Await `use()` in the thread's loop. Raises TimeoutError."""

        async def whole() -> T:
            async with asyncio.timeout(deadline):
                return await use()

        return asyncio.run_coroutine_threadsafe(whole(), self._running_loop()).result()

    def discard(self, deadline: float) -> None:
        """Stop the engine; the next use starts another."""
        engine, self.engine = self.engine, None
        self.version, self.changed = 0, False
        if engine is not None:
            self.call(lambda: _stopped(engine), deadline)

    def close(self, deadline: float) -> None:
        """Stop the engine and end the thread."""
        try:
            self.discard(deadline)
        finally:
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
            if loop is not None and thread is not None:
                loop.call_soon_threadsafe(loop.stop)
                thread.join(deadline)
                assert not thread.is_alive(), "the engine's event loop does not end"

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=_run, args=(self._loop,), name="engine-under-test", daemon=True)
            self._thread.start()
        return self._loop


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()


async def _started(engine: Any) -> Any:
    try:
        await engine.start()
    except BaseException:
        await engine.stop()
        raise
    return engine


async def _stopped(engine: Any) -> None:
    await engine.stop()
    await engine.stop()  # safe to call twice
