"""What a command costs before it does anything."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

TIMES = 8
YARDSTICK = ("-c", "import pydantic, yaml")
"""What a command that reads settings cannot do without: 0.15 s where `slime config show` takes 0.42 s."""


def cost(arguments: Sequence[str], directory: Path) -> float:
    """Processor time of Python with these arguments in an empty directory, in multiples of the yardstick's.

    The two in turn, the best of several each: neither how fast nor how busy the machine is, is meant.
    """
    # Compiled, by the first run, as installed modules are.
    env = {**os.environ, "PYTHONPYCACHEPREFIX": str(directory / "compiled"), "PYTHONDONTWRITEBYTECODE": ""}

    def seconds(words: Sequence[str]) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *words], cwd=directory, env=env, check=True, capture_output=True, timeout=60)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime

    times = [(seconds(arguments), seconds(YARDSTICK)) for _ in range(TIMES)]
    return min(time for time, _ in times) / min(time for _, time in times)
