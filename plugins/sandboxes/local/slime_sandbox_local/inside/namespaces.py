"""This process -> namespaces of its own: users, mounts, processes, network, System V objects, host name.

`main.py` calls `separate` in the keeper's process, before the sandbox's first process is forked. As root the program's
user is one that nobody else on this machine is; otherwise it is the keeper's own user, which means nothing inside. The
map of users is written from outside, by a helper forked before, since a process in a new user namespace has no rights
in the old one.
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
"""The program's user inside."""
_ALONE, _SHARED = b"two users", b"one user"
_RANDOM_USERS = (1_000_000, 1 << 24), (20_000, 40_000)
"""First and number of the users outside that it may be; the second where a container maps only the first 65536."""


def separate(*, network: bool) -> tuple[dict[str, str], bool]:
    """Enter what can be had; what cannot, and why; and whether the program's user is nobody else outside.

    With `network` that namespace is not wanted.
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
    """Users that nobody on this machine should be."""
    number = int.from_bytes(os.urandom(4), "big")
    return (first + number % count for first, count in _RANDOM_USERS)


def _new_mounts() -> None:
    """Raises OSError: there is no such namespace, or nothing may be mounted in it as `root_dir.py` does."""
    unshare(NEW_NS, "mount")
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    os.close(detached("/usr", read_only=True))


def _new_users() -> bool:
    """A user namespace, and its map: whether of two users; raises OSError."""
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
    """Which map it has become, or what went wrong."""
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
