"""A working directory on the host's disk, for want of a file system of the sandbox's own, and what is written there.

`jobs.py` looks while programs run, so what is written between two looks comes on top of the limit; each file is bounded
by the kernel.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import stat
from collections.abc import Iterable, Iterator

_LEAST = 4096
"""Bytes that a file counts for, however short it is, so that their number is bounded, too."""


def make(directory: str, user: int | None) -> None:
    """Make it, for this user."""
    os.mkdir(directory, 0o755)
    if user is not None:
        os.chown(directory, user, user)


def remove(directory: str) -> None:
    """Remove it and all below it, however deep programs have nested it, which Python cannot."""
    command = ["/bin/rm", "-rf", "--", directory]
    os.waitpid(os.posix_spawn(command[0], command, {}), 0)


def written(directory: str, processes: Iterable[int], most: int) -> float:
    """Bytes on disk of the files below it and of those that processes hold open without a name.

    Counted until there are more than `most`; infinite where a directory cannot be listed.
    """
    seen, total = set[tuple[int, int]](), 0
    try:
        for facts in itertools.chain(_nameless(processes), _below(directory)):
            if (facts.st_dev, facts.st_ino) not in seen:
                seen.add((facts.st_dev, facts.st_ino))
                total += max(_LEAST, 512 * facts.st_blocks)
            if total > most:
                break
    except OSError:
        return math.inf
    return total


def _below(directory: str) -> Iterator[os.stat_result]:
    waiting = [directory]
    while waiting:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(waiting.pop()) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    yield entry.stat(follow_symlinks=False)
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)


def _nameless(processes: Iterable[int]) -> Iterator[os.stat_result]:
    for process in processes:
        with contextlib.suppress(OSError), os.scandir(f"/proc/{process}/fd") as entries:  # it has ended
            for entry in entries:
                with contextlib.suppress(OSError):
                    facts = entry.stat()
                    if facts.st_nlink == 0 and stat.S_ISREG(facts.st_mode):
                        yield facts
