"""Let an in-process engine step only when every live sample waits for it.

Otherwise the number of requests in an engine step depends on the speed of reward threads, and so do the last bits of
every log-prob. `rollout.generate` begins each sample when a place is free; the engine calls `may_step`::

    live samples    = running user code (generate function, tool, reward) or waiting for the engine
    engine steps    <=> live samples <= samples waiting for the engine

New work counts as live before the engine can check, however many turns of the event loop it needs to begin. A group has
a `Hold` from the moment it is drawn. It lends the hold to its samples while they run, and takes it back until the
rollout has decided on the group. The rollout decides when everything else is `settled`: on all groups that one engine
step finished, whichever reward thread was first. A finished sample passes its place to the next waiting sample before
the engine can step, together with the rest of its share of the event loop's time. Samples that begin or get their
outputs at the same moment divide this time (`waits.loop_turn`), in their order.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

from slime_core.protocols import RolloutEngine
from slime_core.sample import GenerationOutput
from slime_core.waits import loop_turn, waiting

logger = logging.getLogger(__name__)


class Hold:
    """A group's own live count, held from its drawing to the decision on it, except while it is lent to samples.

    ::

        drawn: live --all samples have asked for a place--> lent --the last one leaves--> live --> complete --> closed
    """

    def __init__(self, gate: GatedEngine) -> None:
        self._gate = gate
        self._live = self._complete = self._closed = False
        self._running = 0
        """Number of samples that have asked for a place and have not left."""
        self.take_back()

    def __enter__(self) -> Hold:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def place(self) -> Place:
        """Return a place for one of the group's samples, in call order; once all have asked, `lend` the hold."""
        self._running += 1
        return Place(self._gate, self)

    def left(self) -> None:
        """Note that a sample has left its place; after the last one the group is live again."""
        self._running -= 1
        if self._running == 0:
            self.take_back()

    def lend(self) -> None:
        """Lend the hold to the group's samples, until the last of them leaves."""
        if self._live:
            self._live = False
            self._gate._add_live(-1)

    def take_back(self) -> None:
        """End the loan, because the group no longer waits for its samples."""
        if not self._live and not self._closed:
            self._live = True
            self._gate._add_live(1)

    def complete(self) -> None:
        """Mark the group as complete and undecided: `settled` does not wait for it."""
        self.take_back()
        if not self._closed:
            self._complete = True
            self._gate._add_complete(1)

    def close(self) -> None:
        """Release the hold of a decided or abandoned group; running samples stay live. Safe to call twice."""
        if self._complete:
            self._complete = False
            self._gate._add_complete(-1)
        self.lend()
        self._closed = True


class Place:
    """A sample's place among those that run at once, asked for when it is made; the sample is live in it."""

    __slots__ = ("_gate", "_hold", "_left", "_turn")

    def __init__(self, gate: GatedEngine, hold: Hold) -> None:
        self._gate, self._hold, self._left = gate, hold, False
        self._turn = gate._enter(self)

    async def begin(self) -> None:
        """Wait until the place is free; its first holder also waits for its share of the event loop's time."""
        if self._turn is None:
            await loop_turn()
        else:
            await self._turn

    def pass_on(self) -> bool:
        """Let the sample begin in a predecessor's place, and the rest of its time. Return False if it has given up."""
        assert self._turn is not None
        if not self._left and not self._turn.done():
            self._turn.set_result(None)
            return True
        return False

    def leave(self) -> None:
        """Leave the place, or stop waiting for it. Safe to call twice, so that it may also end a task never begun."""
        if self._left:
            return
        self._left = True
        self._hold.left()
        if self._turn is None or (self._turn.done() and not self._turn.cancelled()):
            self._gate._leave()


class GatedEngine:
    """The engine as generate functions see it: passes every call through, and counts `generate` and `stream`."""

    def __init__(self, engine: RolloutEngine, *, deterministic: bool, places: int = 1 << 30) -> None:
        """`places` is the number of samples that may run at once."""
        self._engine = engine
        self._free = places
        self._queue: deque[Place] = deque()
        self._full = waiting("a free place for samples", deadline=None, then="deadlines of those inside free one")
        self._live = 0
        self._complete = 0
        self._waiting = 0
        self._held_since: float | None = None
        self._held = 0.0
        self._warned = False
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

    def hold(self) -> Hold:
        """Return a hold for a group that is about to run; the engine waits until it is closed or lent to samples."""
        return Hold(self)

    def _enter(self, place: Place) -> asyncio.Future[None] | None:
        """Return None if the place is free, which makes the sample live; else a future that is done when it is."""
        if self._free:
            self._free -= 1
            self._add_live(1)
            return None
        if not self._queue:
            self._full.__enter__()
        self._queue.append(place)
        return asyncio.get_running_loop().create_future()

    def _leave(self) -> None:
        """Pass the place and its live count to the next sample in the queue, or free them."""
        while self._queue:
            place = self._queue.popleft()
            if not self._queue:
                self._full.__exit__()
            if place.pass_on():
                return
        self._free += 1
        self._add_live(-1)

    async def settled(self) -> None:
        """Wait until every live sample waits for the engine; complete, undecided groups do not count."""
        while self._notify is not None and self._live - self._complete > self._waiting:
            self._change.clear()
            with waiting("user code of samples that are live", deadline=None, then="their own deadlines end them"):
                await self._change.wait()

    def _add_live(self, count: int) -> None:
        self._live += count
        self._changed()

    def _add_complete(self, count: int) -> None:
        self._complete += count
        self._changed()

    async def generate(
        self,
        input_ids: Sequence[int],
        sampling_params: Mapping[str, object],
        *,
        rid: str | None = None,
        session_id: str | None = None,
        image_data: Sequence[str] = (),
        adapter: str | None = None,
    ) -> GenerationOutput:
        """Generate a response; see `RolloutEngine.generate`."""
        given: Any = {"image_data": image_data, "adapter": adapter}
        given = {name: value for name, value in given.items() if value}
        self._add_waiting(1)
        try:
            output = await self._engine.generate(input_ids, sampling_params, rid=rid, session_id=session_id, **given)
        finally:
            self._add_waiting(-1)
        await loop_turn()  # live and not waiting: a deterministic engine does not step now
        return output

    def _add_waiting(self, count: int) -> None:
        if self._waiting == 0:
            self._busy_since = asyncio.get_running_loop().time()
        self._waiting += count
        if self._waiting == 0:
            self._busy += self._busy_for()
            self._busy_since = None
        self._changed()

    @property
    def stream(self) -> Callable[..., AsyncIterator[GenerationOutput]]:
        """The engine's `stream`, counted like `generate`. Raises AttributeError if the engine has no `stream`."""
        return partial(self._stream, self._engine.stream)  # type: ignore[attr-defined]

    async def _stream(
        self, call: Callable[..., AsyncGenerator[GenerationOutput, None]], *args: object, **kwargs: object
    ) -> AsyncIterator[GenerationOutput]:
        self._add_waiting(1)
        try:
            async with aclosing(call(*args, **kwargs)) as outputs:
                async for output in outputs:
                    yield output
        finally:
            self._add_waiting(-1)

    def _busy_for(self) -> float:
        return 0.0 if self._busy_since is None else asyncio.get_running_loop().time() - self._busy_since

    def take_busy_seconds(self) -> float:
        """Return the seconds since the last call with at least one request in the engine, by the event loop's clock."""
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

    def take_held_seconds(self, of: float) -> float:
        """Return the seconds since the last call, `of` seconds ago, in which requests waited for others' user code.

        Warns once if determinism costs a large part of the run's time.
        """
        held, self._held = self._held, 0.0
        if held > max(0.25 * of, 5.0) and not self._warned:
            self._warned = True
            logger.warning(
                "the engine was held %.0f of %.0f s while rewards or tools of other samples ran;"
                " --no-deterministic-mode lets it go on, at the price of bitwise reproducibility",
                held, of,
            )  # fmt: skip
        return held
