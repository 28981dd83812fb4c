"""Confine a forked process, before it executes the program: set limits, drop rights, filter system calls.

`jobs.py` calls `confine` after each fork. The order matters: limits and the bounding set need rights that are dropped
afterwards, and a change of user resets the signal at the parent's death.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from dataclasses import dataclass
from typing import Any

from slime_sandbox_local.inside import kernel, landlock
from slime_sandbox_local.inside.root_dir import DEVICES, SYSTEM

_MEGA = 1 << 20


@dataclass(frozen=True)
class Confinement:
    """Limits and rights of every program of a sandbox."""

    limits: dict[str, Any]
    """`SandboxLimits` as a mapping."""
    filter: bytes
    """Filter of system calls; empty without a filter."""
    readable: tuple[str, ...]
    """Directories that Landlock leaves readable; used if no mount namespace hides the other directories."""
    writable: str
    """Working directory; "" if the mount namespace confines files."""
    user: int | None
    """User id to switch to; None keeps the current user."""
    processes_before: int = 0
    """Number of the user's other processes, which the kernel counts together with the sandbox's."""


def confine(given: Confinement) -> None:
    """Confine this process irreversibly."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:  # no /proc
        file.write("1000")
    _limit(given)
    kernel.close_bounding_set()
    if given.user is not None:
        with contextlib.suppress(OSError):  # not permitted if the map of users has one line
            os.setgroups([])
        os.setresgid(given.user, given.user, given.user)
        os.setresuid(given.user, given.user, given.user)
    kernel.drop_capabilities()
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    if given.writable:
        with contextlib.suppress(OSError):  # reported as missing at the start
            landlock.restrict(
                (*SYSTEM, *given.readable, "/proc/self"), (given.writable, *DEVICES), network=given.limits["network"]
            )
    if given.filter:
        kernel.seccomp(given.filter)


def _limit(given: Confinement) -> None:
    limits = given.limits
    file_mb = min(limits["file_mb"], limits["disk_mb"])
    values = {
        "RLIMIT_AS": limits["memory_mb"] * _MEGA, "RLIMIT_CPU": max(1, int(limits["cpu_seconds"])),
        "RLIMIT_FSIZE": file_mb * _MEGA, "RLIMIT_CORE": 0, "RLIMIT_NOFILE": limits["open_files"],
        "RLIMIT_STACK": min(limits["stack_mb"], limits["memory_mb"] // 2) * _MEGA, "RLIMIT_MEMLOCK": 0,
        "RLIMIT_MSGQUEUE": 0, "RLIMIT_SIGPENDING": 256, "RLIMIT_NPROC": limits["processes"] + given.processes_before,
    }  # fmt: skip
    for name, value in values.items():
        kind = getattr(resource, name)
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))
