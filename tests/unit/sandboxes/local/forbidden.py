"""A thread that may not do what a container's profile or an old kernel forbids, and a Python that any user can read.

A filter of system calls holds for the thread that installs it and for all that it starts.
"""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from slime_sandbox_local.inside import kernel, syscall_filter

PYTHON = "/usr/bin/python3"
_NAMESPACES = {"unshare": 1, "setns": 1, "mount": 1, "pivot_root": 1, "open_tree": 1, "clone3": 38}
"""Call -> the error that it gives; Docker's profile does so for root without CAP_SYS_ADMIN."""
MODES = {
    "all": {}, "namespaces": _NAMESPACES, "mounts": {"mount": 1}, "landlock": {"landlock": 38},
    "namespaces and landlock": {**_NAMESPACES, "landlock": 38},
}  # fmt: skip
"""What is forbidden, by name."""
_NUMBERS = {"landlock": (444, 444), "clone3": (435, 435), **syscall_filter._DENIED}


def forbid(mode: str) -> None:
    """From here on, in this thread and what it starts."""
    column = ("x86_64", "aarch64").index(platform.machine())
    code = [syscall_filter._word(syscall_filter._LOAD, syscall_filter._NUMBER)]
    for name, error in MODES[mode].items():
        equal = syscall_filter._word(syscall_filter._JUMP_EQUAL, _NUMBERS[name][column], 0, 1)
        code += [equal, syscall_filter._fail(error)]
    if MODES[mode]:
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
        kernel.seccomp(b"".join([*code, syscall_filter._word(syscall_filter._RETURN, syscall_filter._ALLOW)]))


@contextlib.contextmanager
def python_of_all() -> Iterator[None]:
    """Sandboxes are made with a Python that any user can read."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", PYTHON)
        patch.setattr(sys, "prefix", "/usr")
        patch.setattr(sys, "base_prefix", "/usr")
        yield


def skip_unless_possible(mode: str) -> None:
    if mode == "all":
        return
    if os.geteuid() != 0:
        pytest.skip("only root's programs become another user")
    done = subprocess.run([PYTHON, "-c", "import enum; enum.StrEnum"], capture_output=True) if _there() else None
    if done is None or done.returncode:
        pytest.skip(f"{PYTHON} is not 3.11 or later")


def _there() -> bool:
    return Path(PYTHON).exists()
