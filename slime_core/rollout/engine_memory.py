"""State of the memory of the stage's engine, under `--offload-rollout`.

`RolloutStage` calls this; `launch.drive` decides when. The state is kept with the engine and not in the loop: after a
trainer's failure in the middle of a step, the loop may start again while the engine keeps running. Only engines with
`release_memory` and `resume_memory` (`protocols.RolloutEngine`) are used.
"""

from __future__ import annotations

from typing import Any

from slime_core.waits import waiting

TAGS = ("weights", "kv_cache")
"""Parts of the engine's memory, in the order of resumption."""


class EngineMemory:
    """The parts of its memory that the engine has released."""

    def __init__(self) -> None:
        self._released: set[str] = set()

    async def release(self, engine: Any) -> None:
        """Release all memory; do nothing without an engine, or if it is released already. Raises EngineError."""
        if engine is not None and not self._released:
            with waiting("the engine to give up its memory", deadline=None, then="its requests have deadlines"):
                await engine.abort()  # requests that a timeout or a user's function left behind
                await engine.release_memory()
            self._released = set(TAGS)

    async def resume(self, engine: Any, tags: tuple[str, ...]) -> None:
        """Resume the parts `tags`; do nothing for parts that were not released. Raises EngineError."""
        missing = [tag for tag in tags if tag in self._released]
        if engine is not None and missing:
            with waiting("the engine to take its memory again", deadline=None, then="its requests have deadlines"):
                await engine.resume_memory(missing)
            self._released -= set(missing)
