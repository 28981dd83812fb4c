"""Pool of interpreters for many samples, of which a limited number have a sandbox at once.

::

    run(key, code, history) --has a sandbox--> run the code
                            --has none--> a free place, else the place idle for longest --> history, code

Generate functions hold one pool per process (`pool_of`). A sample never waits for another sample to finish, only for
running calls, which have deadlines. A sample whose interpreter was evicted, or which continues in another process, gets
its state back by running its earlier code again without output. So code that reads clocks, or draws random numbers
without a seed, may get another state.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slime_core.waits import waiting
from slime_sandbox_local.interpreter import Interpreter, Ran
from slime_sandbox_local.local import LocalSandbox
from slime_sandbox_local.protocol import SandboxError, SandboxLimits

if TYPE_CHECKING:
    from slime_core.protocols import Args

_LOOK_AGAIN = 5.0
"""Seconds after which a waiter checks for a free place without a notification."""


@dataclass(frozen=True)
class Call:
    """Result of a sample's call."""

    ran: Ran
    waited: float
    """Seconds until the call had a sandbox with the sample's state."""
    seconds: float
    """Seconds that the code ran."""
    replayed: int
    """Number of earlier pieces of code that were run again for this call."""
    evicted: bool = False
    """True if another sample's idle sandbox was ended for this call."""


class InterpreterPool:
    """A pool of at most `size` sandboxes with the same limits."""

    def __init__(self, size: int, limits: SandboxLimits, isolation: str) -> None:
        self.size, self.limits, self.isolation = size, limits, isolation
        self._idle: OrderedDict[Hashable, Interpreter] = OrderedDict()
        """Idle interpreters, least recently used first."""
        self._busy: dict[Hashable, Interpreter | None] = {}
        """Interpreters in a call, or being started or ended."""
        self._waiting: list[asyncio.Future[None]] = []
        self.evictions = 0

    @property
    def live(self) -> int:
        """Number of live sandboxes."""
        return len(self._idle) + len(self._busy)

    async def run(
        self, key: Hashable, code: str, *, history: Sequence[str] = (), timeout: float, wait: float = 600.0
    ) -> Call:
        """Run code with the state of `key`; a key makes one call at a time.

        Args:
            key: Owner of the state.
            code: Python code to run.
            history: Code that built the state since the interpreter was last lost; run again in a fresh interpreter.
            timeout: Seconds for each piece of code.
            wait: Seconds to wait for a place.

        Raises:
            SandboxError: No place was free within `wait` seconds, or the sandbox is gone.
        """
        started = time.monotonic()
        interpreter, fresh, evicted = await self._take(key, wait)
        try:
            if fresh:
                for earlier in history:
                    await interpreter.run(earlier, timeout=timeout)
            ready = time.monotonic()
            ran = await interpreter.run(code, timeout=timeout)
        except BaseException:
            await self._end(key, interpreter)
            raise
        self._idle[key] = interpreter
        self._release(key)
        return Call(ran, ready - started, time.monotonic() - ready, len(history) if fresh else 0, evicted)

    async def drop(self, key: Hashable) -> None:
        """End the sandbox of a key that makes no more calls."""
        interpreter = self._idle.pop(key, None)
        if interpreter is not None:
            self._busy[key] = interpreter
            await self._end(key, interpreter)

    async def close(self) -> None:
        """End all idle sandboxes."""
        for key in list(self._idle):
            await self.drop(key)

    async def _take(self, key: Hashable, wait: float) -> tuple[Interpreter, bool, bool]:
        found = self._idle.pop(key, None)
        if found is not None:
            self._busy[key] = found
            return found, False, False
        try:
            with waiting("a place for a sandbox", deadline=wait, then="the call fails"):
                async with asyncio.timeout(wait):
                    evicted = await self._place(key)
        except TimeoutError:
            raise SandboxError(
                f"no sandbox was free for {wait:g} s (--sandbox-concurrency {self.size}, all of them in calls)"
            ) from None
        interpreter = Interpreter(LocalSandbox(self.limits, isolation=self.isolation))
        try:
            self._busy[key] = await interpreter.__aenter__()
        except BaseException:
            self._release(key)
            raise
        return interpreter, True, evicted

    async def _place(self, key: Hashable) -> bool:
        """Reserve a free place, else the place idle for longest; wait if all are in calls.

        Returns whether another sample's was taken.
        """
        while self.live >= self.size and not self._idle:
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            await asyncio.wait({turn}, timeout=_LOOK_AGAIN)
        evicted = self._idle.popitem(last=False)[1] if self.live >= self.size else None
        self._busy[key] = None
        if evicted is not None:
            self.evictions += 1
            try:
                await evicted.__aexit__(None, None, None)
            except BaseException:
                self._release(key)
                raise
        return evicted is not None

    async def _end(self, key: Hashable, interpreter: Interpreter) -> None:
        try:
            await interpreter.__aexit__(None, None, None)
        finally:
            self._release(key)

    def _release(self, key: Hashable) -> None:
        """Free the place of a key and wake all waiters."""
        self._busy.pop(key, None)
        turns, self._waiting = self._waiting, []
        for turn in turns:
            if not turn.done():
                turn.set_result(None)


_pools: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Any, InterpreterPool]] = weakref.WeakKeyDictionary()


def pool_of(args: Args, limits: SandboxLimits) -> InterpreterPool:
    """Return this event loop's pool for these limits; create it from `--sandbox-concurrency` and `-isolation`."""
    size = args.sandbox_concurrency
    isolation = args.sandbox_isolation
    pools = _pools.setdefault(asyncio.get_running_loop(), {})
    key = (size, isolation, repr(limits))
    if key not in pools:
        pools[key] = InterpreterPool(size, limits, isolation)
    return pools[key]
