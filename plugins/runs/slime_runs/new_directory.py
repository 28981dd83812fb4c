"""Make a directory that appears whole or not at all, where nothing of the user's is; exports and imports call this."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slime_core.errors import ConfigError


def check_new(target: Path, cited: str) -> None:
    """Raise ConfigError, which begins with `cited`, if there is something at `target` but an empty directory."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{cited} is there already; name a new directory")


@contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """Give a place beside `target` for a directory, and move it to `target` at the end; after an error delete it.

    Call `check_new` first: the directory at `target`, if any, has to be empty.
    """
    partial = target.with_name(f".partial-{target.name}")
    if partial.exists():  # left by a process that was killed
        shutil.rmtree(partial)
    try:
        yield partial
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists():
            target.rmdir()
        partial.rename(target)
    finally:
        if partial.exists():
            shutil.rmtree(partial)
