"""A working directory on the host's disk, for want of a file system of the sandbox's own, and what is written there.

`jobs.py` looks while programs run: the kernel bounds each file, but without a mount or rights to set a quota not all of
them together. So what is written between two looks comes on top, and the fewer bytes are left the sooner is the next.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import stat
from collections.abc import Iterable, Iterator

OPEN = ("/tmp", "/var/tmp", "/dev/shm")
"""Directories that everybody may write to, where nothing hides them."""
_LEAST = 4096
"""Bytes that a file counts for, however short it is, so that their number is bounded, too."""
_RATE = 2 << 30
"""Bytes that a program may write a second, about as fast as memory is filled."""
_RARELY_S, _SHARE = 0.02, 5
"""Seconds between looks at most; at least so many times the processor time of one."""


def make(directory: str, user: int | None) -> None:
    """Make it, for this user."""
    os.mkdir(directory, 0o755)
    if user is not None:
        os.chown(directory, user, user)


def remove(*paths: str) -> None:
    """Remove them and all below them, however deep programs have nested it, which Python cannot."""
    command = ["/bin/rm", "-rf", "--", *paths]
    os.waitpid(os.posix_spawn(command[0], command, {}), 0)


def strewn(user: int | None) -> list[str]:
    """What a user that nobody else is has made in the directories open to everybody; nothing for None."""
    found = []
    for directory in OPEN if user is not None else ():
        with contextlib.suppress(FileNotFoundError), os.scandir(directory) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    if entry.stat(follow_symlinks=False).st_uid == user:
                        found.append(entry.path)
    return found


def written(paths: Iterable[str], processes: Iterable[int], most: int) -> float:
    """Bytes on disk of the files at and below `paths` and of those that processes hold open without a name.

    Counted until there are more than `most`; infinite where a directory cannot be listed.
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
    """Seconds until the next look, where so many bytes are left and the last one took so much processor time."""
    return max(_SHARE * took, min(_RARELY_S, left / _RATE))


def _below(paths: Iterable[str]) -> Iterator[os.stat_result]:
    waiting = list(paths)
    while waiting:
        path = waiting.pop()
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            facts = os.lstat(path)
            yield facts
            if stat.S_ISDIR(facts.st_mode):
                waiting += (f"{path}/{name}" for name in os.listdir(path))


def _nameless(processes: Iterable[int]) -> Iterator[os.stat_result]:
    for process in processes:
        with contextlib.suppress(OSError), os.scandir(f"/proc/{process}/fd") as entries:  # it has ended
            for entry in entries:
                with contextlib.suppress(OSError):
                    facts = entry.stat()
                    if facts.st_nlink == 0 and stat.S_ISREG(facts.st_mode):
                        yield facts
