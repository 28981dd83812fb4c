"""Restrict files, TCP, signals and abstract sockets with Landlock, if no mount namespace can hide them.

`rights.py` calls it in the process that becomes the program. Landlock restricts only later opens, and cannot hide that
a file exists.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterable

from slime_sandbox_local.inside.kernel import syscall

_CREATE, _ADD_RULE, _RESTRICT = 444, 445, 446
_READ = 1 << 0 | 1 << 2 | 1 << 3  # execute, read file, read directory
_FILE_ONLY = 1 << 0 | 1 << 1 | 1 << 2 | 1 << 14  # rights that a rule on a file may have
_BITS = {1: 13, 2: 14, 3: 15, 4: 15}
"""Version of the interface -> number of file rights; 16 from version 5 on."""


def version() -> int:
    """Return the version of the kernel's Landlock interface. Raises OSError if the kernel has no Landlock."""
    return syscall(_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint(1), what="landlock")


def lacks(*, same_user: bool) -> dict[str, str]:
    """Return the restrictions that the kernel's Landlock lacks -> reason; only "landlock" if it has no Landlock.

    The system-call filter handles Internet and Unix sockets.

    Args:
        same_user: Programs run as the user of this process, so the kernel would let them signal it.
    """
    try:
        known = version()
    except OSError as error:
        return {"landlock": str(error)}
    wanted = {"the truncation of files": 3} | ({"signals to other processes of the user": 6} if same_user else {})
    return {
        f"landlock for {what}": f"the kernel's has version {known}, it comes with {least}"
        for what, least in wanted.items()
        if known < least
    }


def restrict(readable: Iterable[str], writable: Iterable[str], *, network: bool) -> None:
    """Restrict this process to the given paths; no TCP unless `network`, no signals to outside processes."""
    known = version()
    rights = (1 << _BITS.get(known, 16)) - 1
    tcp = 3 if known >= 4 and not network else 0
    attributes = struct.pack("=QQQ", rights, tcp, 3 if known >= 6 else 0)
    size = 24 if known >= 6 else 16 if known >= 4 else 8
    ruleset = syscall(_CREATE, attributes, ctypes.c_size_t(size), ctypes.c_uint(0), what="landlock_create_ruleset")
    for paths, allowed in ((readable, _READ), (writable, rights)):
        for path in paths:
            _allow(ruleset, path, allowed & rights)
    syscall(_RESTRICT, ctypes.c_int(ruleset), ctypes.c_uint(0), what="landlock_restrict_self")
    os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    rule = struct.pack("=Qi", rights if os.path.isdir(path) else rights & _FILE_ONLY, descriptor)
    syscall(_ADD_RULE, ctypes.c_int(ruleset), ctypes.c_uint(1), rule, ctypes.c_uint(0), what=f"landlock rule {path}")
    os.close(descriptor)
