"""Move this process to namespaces of its own: users, mounts, processes, network, System V objects, host name.

`main.py` calls `separate` in the keeper's process, before the sandbox's first process is forked. If slime runs as root,
the program gets a user id that no other process on this machine uses; otherwise it gets the keeper's own user, which
has no meaning inside. A helper, forked earlier, writes the user map from outside, since a process in a new user
namespace has no rights in the old one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from slime_sandbox_local.inside.kernel import (
    MS_PRIVATE,
    MS_REC,
    NEW_CGROUP,
    NEW_IPC,
    NEW_NET,
    NEW_NS,
    NEW_PID,
    NEW_USER,
    NEW_UTS,
    detached,
    mount,
    unshare,
)

USER = 1000
"""User id of the program inside the namespace."""
_ALONE, _SHARED = b"two users", b"one user"
_RANDOM_USERS = (1_000_000, 1 << 24), (20_000, 40_000)
"""(First, count) of the program's possible user ids outside; the second range is for containers that map only 65536."""


def separate(*, network: bool) -> tuple[dict[str, str], bool]:
    """Enter all available namespaces; with `network`, keep the network namespace.

    Returns:
        Missing namespace -> reason, and whether the program's user id is unique outside.
    """
    try:
        alone = _new_users()
    except OSError as error:
        return {"user namespace": str(error)}, False
    missing = {}
    wanted = {"pid": NEW_PID, "ipc": NEW_IPC, "uts": NEW_UTS, "cgroup": NEW_CGROUP}
    if not network:
        wanted["network"] = NEW_NET
    try:
        _new_mounts()
    except OSError as error:
        missing = {"mount namespace": str(error), "pid namespace": "in it the host's /proc would be of no use"}
        del wanted["pid"]
    for name, flag in wanted.items():
        try:
            unshare(flag, name)
        except OSError as error:
            missing[f"{name} namespace"] = str(error)
    return missing, alone


def random_users() -> Iterator[int]:
    """Yield random user ids that should be unused on this machine."""
    number = int.from_bytes(os.urandom(4), "big")
    return (first + number % count for first, count in _RANDOM_USERS)


def _new_mounts() -> None:
    """Enter a mount namespace. Raises OSError if it is not available, or does not allow the mounts of `root_dir.py`."""
    unshare(NEW_NS, "mount")
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    os.close(detached("/usr", read_only=True))


def _new_users() -> bool:
    """Enter a user namespace and return whether its map has two users. Raises OSError."""
    request, answer = os.pipe(), os.pipe()
    user, group = os.geteuid(), os.getegid()
    helper = os.fork()
    if helper == 0:
        os.close(request[1])
        said = b"nobody asked"
        if os.read(request[0], 1):
            said = _write_maps(os.getppid(), user, group)
        os.write(answer[1], said)
        os._exit(0)
    os.close(request[0])
    os.close(answer[1])
    try:
        unshare(NEW_USER, "user")
        os.write(request[1], b"x")
        said = os.read(answer[0], 4096)
    finally:
        os.close(request[1])
        os.close(answer[0])
        os.waitpid(helper, 0)
    if said not in (_ALONE, _SHARED):
        raise OSError(0, f"the map of users: {said.decode(errors='replace')}")
    return said == _ALONE


def _write_maps(process: int, user: int, group: int) -> bytes:
    """Write the user map of a process; return the kind of map, or an error message."""
    choices: list[tuple[int, int | None]] = [(user, None)]
    if user == 0:
        choices = [*((0, one) for one in random_users()), *choices]
    problem = b""
    for owner, program in choices:
        try:
            if program is None:
                _write(process, "setgroups", "deny")
                _write(process, "gid_map", f"{USER} {group} 1")
                _write(process, "uid_map", f"{USER} {owner} 1")
            else:
                _write(process, "gid_map", f"0 0 1\n{USER} {program} 1")
                _write(process, "uid_map", f"0 0 1\n{USER} {program} 1")
        except OSError as error:
            problem = problem or str(error).encode()
            continue
        return _SHARED if program is None else _ALONE
    return problem


def _write(process: int, name: str, text: str) -> None:
    descriptor = os.open(f"/proc/{process}/{name}", os.O_WRONLY)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)
