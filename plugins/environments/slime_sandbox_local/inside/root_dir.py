"""Build a sandbox's root directory: system and Python read-only, everything else private and in memory.

::

    /usr /bin /lib ...            the host's, read only
    this Python, `read_only`      the host's, read only, under the same paths
    /dev                          null, zero, full, random, urandom; shm, empty
    /proc                         of the sandbox's processes
    /etc                          written here: one user, no secrets
    /sandbox /tmp                 empty; counted, with all else that is written, against `disk_mb`

`main.py` calls `enter_root` in the sandbox's first process, in mount and pid namespaces of its own. Nothing of it is on
the host's disk, and it is gone with the last process.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from slime_sandbox_local.inside.kernel import (
    MS_NODEV,
    MS_NOEXEC,
    MS_NOSUID,
    attach,
    change_root,
    detached,
    mount,
)

WORK = "/sandbox"
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives")
NETWORK = ("/etc/resolv.conf", "/etc/ssl", "/etc/ca-certificates", "/etc/pki")
"""Files that are visible if the sandbox has the host's network."""
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_FILES = {
    "/etc/passwd": "root:x:0:0::/:/bin/sh\nsandbox:x:{user}:{user}::/sandbox:/bin/sh\n",
    "/etc/group": "root:x:0:\nsandbox:x:{user}:\n",
    "/etc/hosts": "127.0.0.1 localhost\n::1 localhost\n",
    "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}
_LINKS = {"/dev/fd": "/proc/self/fd", "/dev/stdin": "fd/0", "/dev/stdout": "fd/1", "/dev/stderr": "fd/2"}
_MOUNT_POINT = "/tmp"
"""Mount point that exists everywhere. The host's files in it stay untouched, since only this process sees the mount."""


def enter_root(readable: Iterable[str], *, user: int, disk_mb: int, network: bool) -> dict[str, str]:
    """Build the root directory and make it this process's root. Return what is missing, and why.

    Raises:
        OSError: An essential mount failed.
    """
    links, trees = _open_all([*SYSTEM, *(NETWORK if network else ()), *readable])
    devices = {path: detached(path, read_only=False) for path in DEVICES}
    mount("tmpfs", _MOUNT_POINT, "tmpfs", MS_NOSUID | MS_NODEV, f"size={disk_mb}m,nr_inodes=20000,mode=755")
    root = _MOUNT_POINT
    for path, target in links.items():
        _parents(root + path)
        os.symlink(target, root + path)
    for path, tree in trees.items():
        _place(root + path, tree)
    for path, tree in devices.items():
        _place(root + path, tree)
    for path, text in _FILES.items():
        _parents(root + path)
        with open(root + path, "x", encoding="ascii") as file:
            file.write(text.format(user=user))
    for path, target in _LINKS.items():
        os.symlink(target, root + path)
    for path in (WORK, "/tmp", "/var/tmp", "/dev/shm"):
        os.makedirs(root + path, exist_ok=True)
        os.chmod(root + path, 0o755 if path == WORK else 0o1777)
    os.chown(root + WORK, user, user)
    missing = _proc(root)
    change_root(root)
    return missing


def _open_all(paths: Iterable[str]) -> tuple[dict[str, str], dict[str, int]]:
    """Return symbolic links with their targets, and all other paths as detached mounts. Skip missing paths."""
    links: dict[str, str] = {}
    trees: dict[str, int] = {}
    for path in paths:
        if any(path == seen or path.startswith(seen + "/") for seen in trees):
            continue
        if os.path.islink(path) and path.count("/") == 1:  # /bin -> usr/bin
            links[path] = os.readlink(path)
        elif os.path.exists(path):
            trees[path] = detached(os.path.realpath(path), read_only=True)
    return links, trees


def _place(target: str, tree: int) -> None:
    _parents(target)
    if os.path.isdir(f"/proc/self/fd/{tree}"):
        os.makedirs(target, exist_ok=True)
    elif not os.path.exists(target):
        with open(target, "xb"):
            pass
    attach(tree, target)


def _parents(path: str) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)


def _proc(root: str) -> dict[str, str]:
    """Mount the sandbox's own /proc. This fails inside a container that hides parts of the host's /proc."""
    os.mkdir(f"{root}/proc")
    try:
        mount("proc", f"{root}/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    except OSError as error:
        return {"/proc": str(error)}
    return {}
