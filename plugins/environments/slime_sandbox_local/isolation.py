"""Detect the isolation that this machine supports by trying, and refuse a run if it is too little.

`check_settings` is the trait `check` of components that need sandboxes (`--sandbox-isolation`). The kernel's version or
a container's name is no reliable evidence, so a sandbox is started and tested.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass

from slime_core.errors import ConfigError
from slime_core.protocols import Args
from slime_sandbox_local.inside import kernel
from slime_sandbox_local.keeper import start_keeper
from slime_sandbox_local.protocol import SandboxError, SandboxLimits

logger = logging.getLogger(__name__)

MODES = ("require", "best-effort", "none")
_WALL = "wall before the files and processes of slime's user"
"""Key in `Isolation.missing` if programs may write the run's files and memory (`inside/main.py`)."""


@dataclass(frozen=True)
class Isolation:
    """The isolation of a sandbox on this machine."""

    missing: dict[str, str]
    """Missing feature -> the kernel's error."""

    @property
    def separate(self) -> bool:
        """True if programs cannot act as the user who runs slime."""
        return _WALL not in self.missing

    @property
    def complete(self) -> bool:
        """True if every feature that `LocalSandbox` documents is available."""
        return not self.missing

    def __str__(self) -> str:
        return "; ".join(f"no {name} ({why})" for name, why in self.missing.items()) or "complete"


def check_isolation(mode: str) -> str:
    """Return the mode. Raises SandboxError if it is unknown."""
    if mode not in MODES:
        raise SandboxError(f"sandbox isolation {mode!r}: one of {', '.join(MODES)}")
    return mode


@functools.cache
def isolation_here() -> Isolation:
    """Start a sandbox and return its isolation, cached for this process. Raises SandboxError if it cannot start."""
    keeper = start_keeper(SandboxLimits(), {})
    keeper.control.close()
    keeper.process.stop()
    return Isolation(keeper.missing)


def require_isolation(mode: str) -> Isolation:
    """Apply `--sandbox-isolation`, and return the isolation of this machine.

    Raises:
        SandboxError: The mode is `require` and the isolation is incomplete, or the mode is `best-effort` and programs
            would have the rights of slime's user. The message names the missing features and the remedy.
    """
    here = isolation_here()
    if check_isolation(mode) == "best-effort" and not here.separate:
        raise SandboxError(
            "programs would run as the user who runs slime and could write that user's files and slime's memory, since"
            f" this machine has {here}. Run slime as root (programs then become another user), or on a kernel with"
            " user namespaces or Landlock; or let programs do all that you may: --sandbox-isolation none"
        )
    if mode == "require" and not here.complete:
        raise SandboxError(
            f"this machine cannot isolate programs completely: {here}. Let processes make user namespaces (as root:"
            " `sysctl -w user.max_user_namespaces=15000`, on Ubuntu also `sysctl -w"
            " kernel.apparmor_restrict_unprivileged_userns=0`; in Docker: `--security-opt seccomp=unconfined"
            " --security-opt systempaths=unconfined`; Linux 5.14 or later), or do without:"
            f" --sandbox-isolation {'best-effort' if here.separate else 'none (programs may do all that you may)'}"
        )
    if not here.complete:
        _warn(str(here), mode)
    if not here.separate:
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)  # closes /proc/<pid>/mem, environ and fd of this process to programs
    return here


def check_settings(args: Args, *, training: bool) -> None:
    """Raise ConfigError if this machine cannot isolate programs as `--sandbox-isolation` requires."""
    try:
        require_isolation(args.sandbox_isolation)
    except SandboxError as error:
        raise ConfigError(f"--sandbox-isolation {args.sandbox_isolation}: {error}") from error


@functools.cache
def _warn(missing: str, mode: str) -> None:
    logger.warning("sandboxes on this machine are not complete (--sandbox-isolation %s): %s", mode, missing)
