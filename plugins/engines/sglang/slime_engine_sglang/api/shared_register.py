"""Which names in shared memory are whose, so that a run removes what a run before it could not.

torch starts a process that removes a dead process's shared memory. When that one was killed as well, as batch systems
do with all processes of a job, up to a copy of the weights would stay until the machine restarts. `shared_memory`
enters each name here. What a reader would get wrong: a process id says nothing, since containers may share /dev/shm
and not their processes; a file lock does, because the kernel drops it with its holder.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import logging
import os
import threading
from pathlib import Path
from typing import IO

logger = logging.getLogger(__name__)


class Register:
    """A locked file beside the names in `folder`; made with the first of them, removed when the process ends well."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._file: IO[str] | None = None
        self._process = 0

    def enter(self, name: str) -> None:
        """The name is this process's from now on; names that are gone already do no harm."""
        with self._lock:
            if self._file is None or self._process != os.getpid():  # a fork has its parent's
                remove_leftovers(self._folder)
                self._file, self._process = self._create(), os.getpid()
            self._file.write(name + "\n")
            self._file.flush()

    def _create(self) -> IO[str]:
        path = self._folder / f"slime-{os.getuid()}-{os.urandom(8).hex()}.names"
        made = path.with_suffix(".new")  # nobody looks at it before it is locked
        file = made.open("x")
        fcntl.flock(file, fcntl.LOCK_EX)
        made.rename(path)
        atexit.register(_forget, path, os.getpid())
        return file


def _forget(path: Path, process: int) -> None:
    if process == os.getpid():
        path.unlink(missing_ok=True)


def remove_leftovers(folder: Path) -> None:
    """Remove what processes of this user that are no more have entered."""
    for path in folder.glob(f"slime-{os.getuid()}-*.names"):
        with contextlib.suppress(FileNotFoundError, BlockingIOError), path.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            left = [folder / name for name in file.read().split() if (folder / name).exists()]
            for segment in left:
                segment.unlink(missing_ok=True)
            path.unlink(missing_ok=True)
            if left:
                logger.info(
                    "removed %d pieces of shared memory that a run left in %s when it was killed", len(left), folder
                )
