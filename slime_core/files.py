"""Files of a run: their names, how untrusted ones are read, and how each is replaced whole or not at all."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

CONFIG, SUMMARY, CHECKPOINTS = "config.yaml", "summary.json", "checkpoints"
OUTPUT = ("actors", "engines", "stalls")
"""Folders of the processes' own output, which is there before any record."""
RUN_FILES = (
    CONFIG, SUMMARY, "metrics.jsonl", CHECKPOINTS, "tensorboard", "weights", "local_weights", "rollouts", "eval",
    "eval.json", "failures", "samples", "events.jsonl", "incidents.jsonl", "trace.jsonl", "profile", *OUTPUT,
)  # fmt: skip
"""Files and folders of a run in its directory."""
HEADER = "# name: value  # origin"
"""First line of the text, by which a run's `config.yaml` is known."""


def open_regular(path: Path) -> BinaryIO:
    """Open a file of a run. Raises OSError for a link, pipe, device or directory: its content may have no end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return open(descriptor, "rb")


def read_regular(path: Path, most: int = 1 << 30) -> bytes:
    """Read a file of a run. Raises OSError as `open_regular`, and for a file of more than `most` bytes."""
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > most:
            raise OSError(errno.EFBIG, f"larger than {most:,} bytes", str(path))
        return file.read()


def flush(path: Path) -> None:
    """Flush a file or directory entry to the device."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, content: bytes | Iterable[bytes], *, durable: bool = False) -> None:
    """Write a file that readers see whole or not at all, also after a kill. Its directory has to exist.

    Args:
        path: The file; an older one is replaced.
        content: All bytes, or parts of them.
        durable: Flush to the device, so that the file is complete after a power cut, too.

    Raises:
        OSError: Writing failed; an older file is unchanged.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")  # processes may write the same file
    try:
        with partial.open("wb") as file:
            file.writelines([content] if isinstance(content, bytes) else content)
        if durable:
            flush(partial)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    if durable:
        flush(path.parent)
