"""A working directory on the host's disk, for a sandbox without its own file system, and a check of its size.

`jobs.py` measures the files while programs run: the kernel limits each file, but without a mount or the right to set a
quota it cannot limit their sum. Programs can exceed the limit by the bytes written between two checks, so checks come
more often the fewer bytes are left.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import stat
from collections.abc import Iterable, Iterator

OPEN = ("/tmp", "/var/tmp", "/dev/shm")
"""Directories that all users may write to, unless the sandbox hides them."""
_LEAST = 4096
"""Minimum bytes counted for a file, so that the number of files is limited, too."""
_RATE = 2 << 30
"""Bytes per second that a program may write, about the speed of filling memory."""
_RARELY_S, _SHARE = 0.02, 5
"""Maximum seconds between checks, and minimum time between checks in multiples of a check's processor time."""
_DEEPEST = 200
"""Most directories inside each other: the kernel reads a path in time that grows with its depth, and `rm` removes one
directory after the other."""


def make(directory: str, user: int | None) -> None:
    """Make the directory and give it to `user`."""
    os.mkdir(directory, 0o755)
    if user is not None:
        os.chown(directory, user, user)


def remove(*paths: str) -> None:
    """Remove paths with all contents, also nested so deeply that Python cannot remove them."""
    command = ["/bin/rm", "-rf", "--", *paths]
    os.waitpid(os.posix_spawn(command[0], command, {}), 0)


def strewn(user: int | None) -> list[str]:
    """Return the entries in `OPEN` that belong to a sandbox's own user; empty for None."""
    found = []
    for directory in OPEN if user is not None else ():
        with contextlib.suppress(FileNotFoundError), os.scandir(directory) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    if entry.stat(follow_symlinks=False).st_uid == user:
                        found.append(entry.path)
    return found


def written(paths: Iterable[str], processes: Iterable[int], most: int) -> float:
    """Return the bytes on disk of files at and below `paths` and of deleted files that processes hold open.

    Stops counting above `most`; infinite if a directory cannot be listed or more than `_DEEPEST` lie in each other.
    """
    seen, total = set[tuple[int, int]](), 0
    try:
        for facts in itertools.chain(_nameless(processes), _below(paths)):
            if (facts.st_dev, facts.st_ino) not in seen:
                seen.add((facts.st_dev, facts.st_ino))
                total += max(_LEAST, 512 * facts.st_blocks)
            if total > most:
                break
    except OSError:
        return math.inf
    return total


def until_next(left: float, took: float) -> float:
    """Return the seconds until the next check, given the bytes left and the processor time of the last check."""
    return max(_SHARE * took, min(_RARELY_S, left / _RATE))


def _below(paths: Iterable[str]) -> Iterator[os.stat_result]:
    waiting = [(path, 0) for path in paths]
    while waiting:
        path, depth = waiting.pop()
        if depth > _DEEPEST:
            raise OSError(f"{path}: too deep")
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            facts = os.lstat(path)
            yield facts
            if stat.S_ISDIR(facts.st_mode):
                waiting += ((f"{path}/{name}", depth + 1) for name in os.listdir(path))


def _nameless(processes: Iterable[int]) -> Iterator[os.stat_result]:
    for process in processes:
        with contextlib.suppress(OSError), os.scandir(f"/proc/{process}/fd") as entries:  # it has ended
            for entry in entries:
                with contextlib.suppress(OSError):
                    facts = entry.stat()
                    if facts.st_nlink == 0 and stat.S_ISREG(facts.st_mode):
                        yield facts
