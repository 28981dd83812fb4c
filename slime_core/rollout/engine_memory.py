"""Whether the stage's engine has its memory, under `--offload-rollout`.

`RolloutStage` asks; `launch.offload` says when. Kept beside the engine and not in the loop, which may be begun again
after a trainer's failure, in the middle of a step, while the engine goes on. Only an engine with `release_memory` and
`resume_memory` (`protocols.RolloutEngine`) is ever asked.
"""

from __future__ import annotations

from typing import Any

from slime_core.waits import waiting

TAGS = ("weights", "kv_cache")
"""In the order in which they are taken again."""


class EngineMemory:
    """What of it the engine has released."""

    def __init__(self) -> None:
        self._released: set[str] = set()

    async def release(self, engine: Any) -> None:
        """All of it; nothing without an engine, or where it has been. Raises EngineError."""
        if engine is not None and not self._released:
            with waiting("the engine to give up its memory", deadline=None, then="its requests have deadlines"):
                await engine.abort()  # what a timeout or a user's function has left behind
                await engine.release_memory()
            self._released = set(TAGS)

    async def resume(self, engine: Any, tags: tuple[str, ...]) -> None:
        """A part of it; nothing where that is there. Raises EngineError."""
        missing = [tag for tag in tags if tag in self._released]
        if engine is not None and missing:
            with waiting("the engine to take its memory again", deadline=None, then="its requests have deadlines"):
                await engine.resume_memory(missing)
            self._released -= set(missing)
