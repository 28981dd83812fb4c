"""A lock file between processes of one machine; the kernel lets go of it when its holder dies, however it dies."""

from __future__ import annotations

import fcntl
import os
import shlex
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from slime_core.errors import ConfigError

_POLL = 0.1


def sole_writer(run_dir: Path) -> AbstractContextManager[None]:
    """Two runs in one directory would mix their checkpoints and metrics. Raises ConfigError at once."""
    return file_lock(run_dir / ".lock", deadline=0.0, refusal=f"{run_dir}: another run is writing here; choose another")


@contextmanager
def file_lock(path: Path, *, deadline: float, refusal: str) -> Iterator[None]:
    """Hold the lock, waiting up to `deadline` seconds for it. Raises ConfigError with `refusal` after that."""
    end = time.monotonic() + deadline
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        opened = path.open("a")  # a file of another's that has this name keeps its content
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}") from error
    with opened as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= end:
                    raise ConfigError(f"{refusal} (lock {path}{_holders(path)})") from None
                time.sleep(_POLL)
        yield


def _holders(path: Path) -> str:
    """The processes of this host that have the file open, as far as this user may see them."""
    import psutil

    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and any(file.path == str(path.resolve()) for file in process.open_files()):
                found.append(f"process {process.pid}: {shlex.join(process.cmdline())}")
        except psutil.Error:  # it has ended, or is another user's
            continue
    return "; held by " + "; ".join(found) if found else "; held by another user's process, or on another host"
