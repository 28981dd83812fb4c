"""A real directory whose every change is an event of the simulation: it can fail, and the process can die before it.

`world.py` wraps a life in `watched`. The functions of `os` and `open` that change files are replaced in this process
meanwhile, for paths below one directory; `os.fsync` does nothing there, since what a killed process wrote is kept by
the kernel. This is a process that dies, not a machine that loses power.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_CHANGES = ("rename", "replace", "mkdir", "rmdir", "unlink", "remove", "link", "symlink", "truncate")
_ERRORS = {"full": errno.ENOSPC, "denied": errno.EACCES}


@contextmanager
def watched(root: Path, event: Callable[[str], str | None]) -> Iterator[None]:
    """Ask `event(description)` before each change below `root`.

    It may raise, or return "full" or "denied" for an OSError.
    """
    prefix = str(root)
    real: dict[tuple[Any, str], Any] = {(os, name): getattr(os, name) for name in _CHANGES}
    real |= {(os, "fsync"): os.fsync, (io, "open"): io.open, (builtins, "open"): builtins.open}

    def ask(what: str, path: Any) -> None:
        path = os.fspath(path) if isinstance(path, (str, os.PathLike)) else ""
        if isinstance(path, str) and path.startswith(prefix):
            failure = event(f"{what} {path[len(prefix) :]}")
            if failure in _ERRORS:
                raise OSError(_ERRORS[failure], os.strerror(_ERRORS[failure]), path)

    def change(name: str) -> Callable[..., Any]:
        function = real[os, name]

        def replaced(path: Any, *args: Any, **keywords: Any) -> Any:
            folder = keywords.get("dir_fd")  # how `shutil.rmtree` names files
            ask(name, path if folder is None else os.path.join(os.readlink(f"/proc/self/fd/{folder}"), path))
            return function(path, *args, **keywords)

        return replaced

    real_open = io.open

    def replaced_open(file: Any, mode: str = "r", *args: Any, **keywords: Any) -> Any:
        if mode[0] != "r" or "+" in mode:
            ask("write", file)
        return real_open(file, mode, *args, **keywords)

    for name in _CHANGES:
        setattr(os, name, change(name))
    os.fsync = lambda fd: None
    io.open = builtins.open = replaced_open
    try:
        yield
    finally:
        for (module, name), function in real.items():
            setattr(module, name, function)
