"""Makes an in-process engine step only when every live sample waits for it.

Without this, how many requests share an engine step depends on how fast reward threads answer, and with it the last
bits of every log-prob. `pipeline.generate` brackets each sample with `live()`; the engine asks `may_step`::

    live samples    = running user code (generate function, tool, reward) or waiting for the engine
    engine steps    <=> live samples <= samples waiting for the engine
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from slime_core.protocols import RolloutEngine
from slime_core.types import GenerationOutput


class GatedEngine:
    """The engine as generate functions see it: every call but `generate` goes straight through."""

    def __init__(self, engine: RolloutEngine, *, deterministic: bool) -> None:
        self._engine = engine
        self._live = 0
        self._waiting = 0
        self._held_since: float | None = None
        self._held = 0.0
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
        self._live += 1
        self._changed()
        try:
            yield
        finally:
            self._live -= 1
            self._changed()

    async def generate(
        self,
        input_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        *,
        rid: str | None = None,
        session_id: str | None = None,
    ) -> GenerationOutput:
        """As `RolloutEngine.generate`."""
        self._waiting += 1
        self._changed()
        try:
            return await self._engine.generate(input_ids, sampling_params, rid=rid, session_id=session_id)
        finally:
            self._waiting -= 1
            self._changed()

    def _changed(self) -> None:
        if self._notify is None:
            return
        held = self._waiting > 0 and not self._may_step()
        if held and self._held_since is None:
            self._held_since = time.perf_counter()
        elif not held and self._held_since is not None:
            self._held += time.perf_counter() - self._held_since
            self._held_since = None
        self._notify()

    def take_held_seconds(self) -> float:
        """Seconds in which requests waited for user code of other samples, since the last call."""
        held, self._held = self._held, 0.0
        return held
