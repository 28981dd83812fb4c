"""A command -> a guarded process with a log file of its own; shared by servers, routers and what stands beside."""

from __future__ import annotations

from pathlib import Path

from slime_core.errors import EngineError
from slime_core.procs.guarded import Guarded
from slime_engine_sglang.log_tail import LogTail

GRACE_S = 2.0
"""From TERM to KILL. SGLang would take 5 to 7 seconds, of which it sleeps 5, and has nothing to save."""
_SHARED = "/dev/shm/sglang_loads_"
"""Start of a file that each of SGLang's schedulers makes (its managers/load_snapshot.py) and nobody removes."""


class KeptProcess(Guarded):
    """A `Guarded` of which the end of the log is of interest."""

    log: Path

    def __init__(self, name: str, log: Path, *, grace: float = GRACE_S) -> None:
        super().__init__(name, stop_s=grace, log=log, shared=_SHARED, error=EngineError)

    @property
    def tail(self) -> LogTail:
        """The end of the log of the last start."""
        return LogTail.of(self.log, self.begin)
