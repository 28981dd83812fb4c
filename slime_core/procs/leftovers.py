"""A small process beside a command that started daemons of its own: ends them when the command is killed.

`Keeper` runs it as a program, `python leftovers.py`, with the standard library only, and writes the processes
below the command into its standard input, one `PID BIRTH` per line. When that closes without the word `done` before,
the command is gone, and what is left of them is killed. What a reader would get wrong: most daemons of Ray end by
themselves with the command; its agents look for their parent only now and then, and were left for a minute and more.
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

DONE = "done"
_CLOSE_DEADLINE = 10.0
# By its path: as a program this file knows no packages.
_PROCESSES = runpy.run_path(str(Path(__file__).parents[1] / "waits" / "processes.py"))
below: Callable[[int], list[int]] = _PROCESSES["below"]
birth: Callable[[int], str] = _PROCESSES["birth"]


class Keeper:
    """The command's side."""

    def __init__(self) -> None:
        command = [sys.executable, "-I", "-S", __file__]
        # A session of its own: ctrl-C in the terminal is for the command.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True,
            start_new_session=True,
        )  # fmt: skip
        self._write(f"{pid} {birth(pid)}" for pid in below(os.getpid()) if pid != self._process.pid)

    def close(self) -> None:
        """The daemons have been ended as Ray ends them."""
        self._write([DONE])
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=_CLOSE_DEADLINE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout=_CLOSE_DEADLINE)

    def _write(self, lines: Iterable[str]) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):  # it was killed: nothing is kept then
            self._process.stdin.write("".join(f"{line}\n" for line in lines))
            self._process.stdin.flush()


def main() -> None:
    """Until standard input ends."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    lines = sys.stdin.read().splitlines()
    if DONE in lines:
        return
    for line in lines:
        pid, _, born = line.partition(" ")
        if born and birth(int(pid)) == born:
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


if __name__ == "__main__":
    main()
