"""Who the programs of a sandbox are, so that the kernel keeps the run's files and processes from them.

`main.py` asks in the sandbox's first process. With a user namespace `namespaces.py` has made a user for them; without
one, root's programs become a user that nobody else on this machine is, and those of anybody else stay who they are,
since only root may become another.
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
    """The number that `rights.confine` takes on; None: it stays who it is.

    Args:
        paths: Of the host that programs must be able to read.
        root: slime runs as root.
        separate: In a user namespace, with `namespaces.USER`.
        alone: Whose user nobody else outside is.
        own_files: A mount namespace hides the host's files.

    Raises:
        Refused: It would be root with the host's files before it; what to do.
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
    """Processes that the kernel counts with the sandbox's, being of the same user.

    Args:
        user: Who the programs are.
        separate: In a user namespace.
        alone: Whose user nobody else outside is.
    """
    if separate and (_kernel() >= (5, 14) or alone):
        return 0 if alone else 2  # the keeper and the first process, where they have the only user that there is
    return _processes_of_user() if user is None or separate else 0


def _kernel() -> tuple[int, int]:
    """From 5.14 on, processes are counted for each user namespace."""
    major, minor = platform.release().split(".")[:2]
    return int(major), int("".join(c for c in minor if c.isdigit()) or 0)


def _closed(path: str) -> str:
    """The directory on the way that others may not enter; "" where there is none."""
    path = os.path.realpath(path)
    while path != "/":
        if not os.stat(path).st_mode & stat.S_IXOTH:
            return path
        path = os.path.dirname(path)
    return ""


def _may_become(user: int) -> bool:
    """Tried in a child, since there is no way back."""
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
