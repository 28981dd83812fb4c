"""Make a directory that appears whole or not at all, where nothing of the user's is; exports and imports call this."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slime_core.errors import ConfigError


def check_new(target: Path, cited: str) -> None:
    """Raise ConfigError, which begins with `cited`, if there is something at `target` but an empty directory."""
    if target.exists() and (not target.is_dir() or {*target.iterdir()} - {_partial(target)}):
        raise ConfigError(f"{cited} is there already; name a new directory")


@contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """Give an empty directory, and move it to `target` at the end; after an error delete it.

    Call `check_new` first: the directory at `target`, if any, has to be empty. It stays and gets the files, since it
    may be a mounted volume, a link or the current directory.

    Raises:
        ConfigError: The directory cannot be written, or another process is writing it.
    """
    partial = _partial(target)
    try:
        partial.mkdir(parents=True, exist_ok=True)
        held = os.open(partial, os.O_RDONLY)
    except OSError as error:
        raise ConfigError(f"{target}: cannot be written: {error.strerror}") from error
    try:
        if not _lock(held) or not (partial.exists() and os.path.samestat(os.fstat(held), partial.stat())):
            raise ConfigError(f"{target}: another process is writing it; name another directory")
        yield from _moved(partial, target)
    finally:
        os.close(held)


def _lock(descriptor: int) -> bool:
    """Lock a file until its descriptor is closed or the process ends; return False if another process has locked it.

    Some cluster file systems have no locks: there, other processes are not known.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return not isinstance(error, BlockingIOError)
    return True


def _moved(partial: Path, target: Path) -> Iterator[Path]:
    for left in partial.iterdir():  # by a process that was killed
        shutil.rmtree(left) if left.is_dir() else left.unlink()
    try:
        yield partial
        if partial.parent == target:
            for path in partial.iterdir():
                path.rename(target / path.name)
        else:
            partial.rename(target)
    except OSError as error:
        raise ConfigError(f"{target}: could not be written: {error}") from error
    finally:
        if partial.exists():
            shutil.rmtree(partial)


def _partial(target: Path) -> Path:
    folder = target if target.is_dir() else target.parent
    return folder / f".partial-{target.absolute().name}"
