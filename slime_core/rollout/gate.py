"""Makes an in-process engine step only when every live sample waits for it.

Without this, how many requests share an engine step depends on how fast reward threads answer, and with it the last
bits of every log-prob. `rollout.generate` brackets each sample with `live()`; the engine asks `may_step`::

    live samples    = running user code (generate function, tool, reward) or waiting for the engine
    engine steps    <=> live samples <= samples waiting for the engine

A group whose last sample is done stays live until the rollout has decided on it, and the rollout decides when all else
is `settled`: on all groups that one engine step finished, whichever reward thread was first. Likewise a sample that
is done hands its place to the next one that waits for it without the engine stepping in between. Samples that begin or
get their answers at the same moment share out the event loop's time (`waits.loop_turn`), in their order.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from functools import partial
from typing import Any, TypeVar

from slime_core.protocols import RolloutEngine
from slime_core.types import GenerationOutput
from slime_core.waits import loop_turn, waiting

T = TypeVar("T")


class GatedEngine:
    """The engine as generate functions see it: every call but `generate` goes straight through."""

    def __init__(self, engine: RolloutEngine, *, deterministic: bool, places: int = 1 << 30) -> None:
        """`places`: how many samples may be inside `place` at once."""
        self._engine = engine
        self._free = places
        self._queue: deque[asyncio.Future[None]] = deque()
        self._live = 0
        self._waiting = 0
        self._held_since: float | None = None
        self._held = 0.0
        self._busy_since: float | None = None
        self._busy = 0.0
        self._change = asyncio.Event()
        self._notify = getattr(engine, "notify", None) if deterministic else None
        if self._notify is not None:
            engine.may_step = self._may_step  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def _may_step(self) -> bool:
        return self._live <= self._waiting

    @contextmanager
    def live(self) -> Iterator[None]:
        """While inside, the engine waits for this sample whenever it does not wait for the engine."""
        self._add_live(1)
        try:
            yield
        finally:
            self._add_live(-1)

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """One of the places; live while inside. Those who wait for one come in order."""
        if self._free:
            self._free -= 1
            self._add_live(1)
        else:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._queue.append(turn)
            try:
                with waiting("a free place for a sample", deadline=None, then="deadlines of those inside free one"):
                    await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._leave()
                raise
        try:
            await loop_turn()
            yield
        finally:
            self._leave()

    def _leave(self) -> None:
        """Hand the place, and being live, to the next in the queue."""
        while self._queue:
            turn = self._queue.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
        self._add_live(-1)

    @contextmanager
    def completing(self, parts: int) -> Iterator[Callable[[Awaitable[T]], Awaitable[T]]]:
        """A group of so many samples: live from the end of the last one until the block is left.

        Yields a wrapper for the awaitable of each sample.
        """
        left, held, closed = parts, False, False

        async def part(run: Awaitable[T]) -> T:
            nonlocal left, held
            try:
                return await run
            finally:
                left -= 1
                if left == 0 and not closed:
                    held = True
                    self._add_live(1)

        try:
            yield part
        finally:
            closed = True
            if held:
                self._add_live(-1)

    async def settled(self, undecided: Callable[[], int]) -> None:
        """Return when every live sample waits for the engine, but for the groups that are complete and undecided."""
        while self._notify is not None and self._live - undecided() > self._waiting:
            self._change.clear()
            with waiting("user code of samples that are live", deadline=None, then="their own deadlines end them"):
                await self._change.wait()

    def _add_live(self, count: int) -> None:
        self._live += count
        self._changed()

    async def generate(
        self,
        input_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        *,
        rid: str | None = None,
        session_id: str | None = None,
        image_data: Sequence[str] = (),
    ) -> GenerationOutput:
        """As `RolloutEngine.generate`."""
        images: Any = {"image_data": image_data} if image_data else {}
        with self._in_engine():
            output = await self._engine.generate(input_ids, sampling_params, rid=rid, session_id=session_id, **images)
        await loop_turn()  # live and not waiting for the engine: a deterministic one does not step meanwhile
        return output

    @contextmanager
    def _in_engine(self) -> Iterator[None]:
        """A request is in the engine while inside."""
        if self._waiting == 0:
            self._busy_since = asyncio.get_running_loop().time()
        self._waiting += 1
        self._changed()
        try:
            yield
        finally:
            self._waiting -= 1
            if self._waiting == 0:
                self._busy += self._busy_for()
                self._busy_since = None
            self._changed()

    @property
    def stream(self) -> Callable[..., AsyncIterator[GenerationOutput]]:
        """The engine's `stream`, counted like `generate`. Raises AttributeError for an engine without one."""
        return partial(self._stream, self._engine.stream)  # type: ignore[attr-defined]

    async def _stream(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> AsyncIterator[GenerationOutput]:
        with self._in_engine():
            async with aclosing(call(*args, **kwargs)) as outputs:
                async for output in outputs:
                    yield output

    def _busy_for(self) -> float:
        return 0.0 if self._busy_since is None else asyncio.get_running_loop().time() - self._busy_since

    def take_busy_seconds(self) -> float:
        """Seconds of the event loop's clock in which at least one request was in the engine, since the last call."""
        busy, self._busy = self._busy + self._busy_for(), 0.0
        if self._busy_since is not None:
            self._busy_since = asyncio.get_running_loop().time()
        return busy

    def _changed(self) -> None:
        if self._notify is None:
            return
        held = self._waiting > 0 and not self._may_step()
        if held and self._held_since is None:
            self._held_since = time.perf_counter()
        elif not held and self._held_since is not None:
            self._held += time.perf_counter() - self._held_since
            self._held_since = None
        self._change.set()
        self._notify()

    def take_held_seconds(self) -> float:
        """Seconds in which requests waited for user code of other samples, since the last call."""
        held, self._held = self._held, 0.0
        return held
