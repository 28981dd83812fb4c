"""Choose the user of a sandbox's programs, so that the kernel protects the run's files and processes from them.

`main.py` calls `program_user` in the sandbox's first process. With a user namespace, `namespaces.py` has created a user
for the programs. Without one, programs started by root get an unused user id of this machine; other programs keep their
user, since only root may change it.
"""

from __future__ import annotations

import contextlib
import os
import platform
import stat
from collections.abc import Iterable

from slime_sandbox_local.inside import namespaces


class Refused(Exception):
    """Programs would be root and see the host's files."""


def program_user(paths: Iterable[str], *, root: bool, separate: bool, alone: bool, own_files: bool) -> int | None:
    """Return the user id for `rights.confine`, or None to keep the current user.

    Args:
        paths: Paths of the host that programs must be able to read.
        root: Whether slime runs as root.
        separate: Whether this process is in a user namespace, with `namespaces.USER`.
        alone: Whether the namespace's user id is unique outside.
        own_files: Whether a mount namespace hides the host's files.

    Raises:
        Refused: Programs would be root and see the host's files; the message gives the remedies.
    """
    if own_files or not root:
        return namespaces.USER if separate else None
    for path in filter(os.path.exists, paths):
        if closed := _closed(path):
            raise Refused(
                f"programs must not run as root here, and another user cannot read {path}, since {closed} is closed to"
                f" others: `chmod o+x {closed}`, take a Python elsewhere, run slime as a user who is not root, or let"
                " processes make user namespaces"
            )
    if separate and alone:
        return namespaces.USER
    user = None if separate else next(filter(_may_become, namespaces.random_users()), None)
    if user is None:
        raise Refused(
            "programs must not run as root here, and root may not become another user: run slime as a user who is not"
            " root, or let processes make user namespaces"
        )
    return user


def counted_before(user: int | None, *, separate: bool, alone: bool) -> int:
    """Return the number of other processes that the kernel counts with the sandbox's, as they have the same user.

    Args:
        user: User id of the programs.
        separate: Whether this process is in a user namespace.
        alone: Whether the namespace's user id is unique outside.
    """
    if separate and (_kernel() >= (5, 14) or alone):
        return 0 if alone else 2  # the keeper and the first process, if there is only one user
    return _processes_of_user() if user is None or separate else 0


def _kernel() -> tuple[int, int]:
    """Return the kernel version; from 5.14 on, processes are counted for each user namespace."""
    major, minor = platform.release().split(".")[:2]
    return int(major), int("".join(c for c in minor if c.isdigit()) or 0)


def _closed(path: str) -> str:
    """Return the directory on the path that other users cannot enter, or ""."""
    path = os.path.realpath(path)
    while path != "/":
        if not os.stat(path).st_mode & stat.S_IXOTH:
            return path
        path = os.path.dirname(path)
    return ""


def _may_become(user: int) -> bool:
    """Return whether this process may become the user; tried in a child, since the change cannot be undone."""
    child = os.fork()
    if child == 0:
        try:
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1] == 0


def _processes_of_user() -> int:
    found = 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                if os.stat(f"/proc/{name}").st_uid == os.getuid():
                    found += len(os.listdir(f"/proc/{name}/task"))
    return found
