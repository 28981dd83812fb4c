"""A lock file between processes of one machine; the kernel lets go of it when its holder dies, however it dies."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slime_core.errors import ConfigError

_POLL = 0.1


@contextmanager
def file_lock(path: Path, *, deadline: float, refusal: str) -> Iterator[None]:
    """Hold the lock, waiting up to `deadline` seconds for it. Raises ConfigError with `refusal` after that."""
    end = time.monotonic() + deadline
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        opened = path.open("w")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}") from error
    with opened as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= end:
                    raise ConfigError(f"{refusal} (lock {path})") from None
                time.sleep(_POLL)
        yield
