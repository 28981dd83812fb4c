"""System calls that Python 3.11 has no function for, as functions that raise OSError.

Used by everything in this package. Numbers of calls newer than Linux 5.0 are the same on every architecture; the older
ones are here for x86_64 and aarch64.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct

NEW_USER, NEW_NS, NEW_PID, NEW_NET, NEW_IPC = 0x10000000, 0x00020000, 0x20000000, 0x40000000, 0x08000000
NEW_UTS, NEW_CGROUP = 0x04000000, 0x02000000
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REC, MS_PRIVATE = 2, 4, 8, 0x4000, 0x40000
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS, PR_CAPBSET_DROP = 1, 4, 36, 38, 24
PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
_OPEN_TREE, _MOVE_MOUNT, _MOUNT_SETATTR, _CLOSE_RANGE = 428, 429, 442, 436
_AT_FDCWD, _AT_EMPTY_PATH, _AT_RECURSIVE, _OPEN_TREE_CLONE, _OPEN_TREE_CLOEXEC = -100, 0x1000, 0x8000, 1, os.O_CLOEXEC
_MOVE_MOUNT_F_EMPTY_PATH = 4
_ATTR_READ_ONLY, _ATTR_NOSUID, _ATTR_NODEV = 1, 2, 4
_CAPABILITY_VERSION = 0x20080522
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def syscall(number: int, *arguments: object, what: str) -> int:
    """A raw system call."""
    return _checked(_libc.syscall(ctypes.c_long(number), *arguments), what)


def unshare(flags: int, what: str) -> None:
    """Leave namespaces for new ones."""
    _checked(_libc.unshare(ctypes.c_int(flags)), f"unshare({what})")


def prctl(option: int, first: int = 0, second: int | ctypes.Array[ctypes.c_char] = 0) -> int:
    """The raw result; -1 means that the kernel refused."""
    last = second if not isinstance(second, int) else ctypes.c_ulong(second)
    return int(_libc.prctl(ctypes.c_int(option), ctypes.c_ulong(first), last, ctypes.c_ulong(0), ctypes.c_ulong(0)))


def mount(source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
    """mount(2)."""
    parts = [None if part is None else part.encode() for part in (source, target, kind)]
    _checked(_libc.mount(*parts, ctypes.c_ulong(flags), data.encode() or None), f"mount {kind or ''} on {target}")


def detached(path: str, *, read_only: bool) -> int:
    """A copy of the mounts at and below `path`, not yet anywhere: a descriptor for `attach`."""
    flags = _OPEN_TREE_CLONE | _OPEN_TREE_CLOEXEC | _AT_RECURSIVE
    tree = syscall(_OPEN_TREE, ctypes.c_int(_AT_FDCWD), path.encode(), ctypes.c_uint(flags), what=f"open_tree({path})")
    # Devices stay usable where single nodes are bound writable.
    wanted = _ATTR_NOSUID | (_ATTR_READ_ONLY | _ATTR_NODEV if read_only else 0)
    attributes = struct.pack("=QQQQ", wanted, 0, 0, 0)
    where = ctypes.c_uint(_AT_EMPTY_PATH | _AT_RECURSIVE)
    size = ctypes.c_size_t(len(attributes))
    syscall(_MOUNT_SETATTR, ctypes.c_int(tree), b"", where, attributes, size, what=f"mount_setattr({path})")
    return tree


def attach(tree: int, target: str) -> None:
    """Put a detached mount in its place, and close its descriptor."""
    flags = ctypes.c_uint(_MOVE_MOUNT_F_EMPTY_PATH)
    arguments = ctypes.c_int(tree), b"", ctypes.c_int(_AT_FDCWD), target.encode(), flags
    syscall(_MOVE_MOUNT, *arguments, what=f"move_mount({target})")
    os.close(tree)


def change_root(path: str) -> None:
    """Make `path` the root and lose the old one."""
    number = _PIVOT_ROOT.get(platform.machine())
    if number is None:
        raise OSError(0, f"pivot_root is not known for {platform.machine()}")
    os.chdir(path)
    syscall(number, b".", b".", what="pivot_root")
    _checked(_libc.umount2(b".", ctypes.c_int(MNT_DETACH)), "umount2")
    os.chdir("/")


def close_bounding_set() -> None:
    """No program run from here on gets a capability; needs CAP_SETPCAP, and does nothing without."""
    for capability in range(64):
        if prctl(PR_CAPBSET_DROP, capability) < 0:
            break


def drop_capabilities() -> None:
    """All that this process has."""
    header, none = struct.pack("=Ii", _CAPABILITY_VERSION, 0), struct.pack("=6I", 0, 0, 0, 0, 0, 0)
    _checked(_libc.capset(header, none), "capset")


def close_from(first: int) -> None:
    """Close every descriptor from `first` on."""
    syscall(_CLOSE_RANGE, ctypes.c_uint(first), ctypes.c_uint(0xFFFFFFFF), ctypes.c_uint(0), what="close_range")


def seccomp(program: bytes) -> None:
    """Install a filter of 8-byte BPF instructions; needs `PR_SET_NO_NEW_PRIVS`."""
    code = ctypes.create_string_buffer(program, len(program))
    padding = struct.calcsize("P") - 2
    header = struct.pack(f"=H{padding}x", len(program) // 8) + struct.pack("P", ctypes.addressof(code))
    _checked(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.create_string_buffer(header, len(header))), "seccomp")
