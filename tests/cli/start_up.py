"""What a command costs before it does anything."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Sequence
from pathlib import Path

TIMES = 4


def least_seconds(command: Sequence[str], directory: Path) -> float:
    """Processor time of a command in an empty directory; the best of several: how busy the machine is, is not meant."""
    # Compiled, by the first run, as installed modules are.
    env = {**os.environ, "PYTHONPYCACHEPREFIX": str(directory / "compiled"), "PYTHONDONTWRITEBYTECODE": ""}

    def seconds() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, cwd=directory, env=env, check=True, capture_output=True, timeout=60)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime

    return min(seconds() for _ in range(TIMES))
