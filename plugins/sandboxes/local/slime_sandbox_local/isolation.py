"""What this machine can isolate, found out by trying, and refused clearly before a run where it is too little.

`check_settings` is the trait `check` of what needs sandboxes (`--sandbox-isolation`). The kernel's
version or a container's name says nothing certain; a sandbox is made and asked.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass

from slime_core.errors import ConfigError
from slime_core.protocols import Args
from slime_sandbox_local.keeper import start_keeper
from slime_sandbox_local.limits import SandboxLimits
from slime_sandbox_local.protocol import SandboxError

logger = logging.getLogger(__name__)

MODES = ("require", "best-effort")


@dataclass(frozen=True)
class Isolation:
    """What a sandbox on this machine is made of."""

    missing: dict[str, str]
    """What cannot be had -> why, as the kernel said."""

    @property
    def complete(self) -> bool:
        """Whether everything that `LocalSandbox` promises holds."""
        return not self.missing

    def __str__(self) -> str:
        return "; ".join(f"no {name} ({why})" for name, why in self.missing.items()) or "complete"


def check_isolation(mode: str) -> str:
    """The mode. Raises SandboxError: it is none."""
    if mode not in MODES:
        raise SandboxError(f"sandbox isolation {mode!r}: one of {', '.join(MODES)}")
    return mode


@functools.cache
def isolation_here() -> Isolation:
    """Make a sandbox and ask it; the answer is kept for this process. Raises SandboxError: none can be made at all."""
    keeper = start_keeper(SandboxLimits(), {})
    keeper.control.close()
    keeper.process.stop()
    return Isolation(keeper.missing)


def require_isolation(mode: str) -> Isolation:
    """Act on `--sandbox-isolation`.

    Raises:
        SandboxError: `require`, and this machine cannot isolate everything: what is missing, and what to do.
    """
    here = isolation_here()
    if check_isolation(mode) == "require" and not here.complete:
        raise SandboxError(
            f"this machine cannot isolate programs completely: {here}. Let processes make user namespaces (as root:"
            " `sysctl -w user.max_user_namespaces=15000`, on Ubuntu also `sysctl -w"
            " kernel.apparmor_restrict_unprivileged_userns=0`; in Docker: `--security-opt seccomp=unconfined"
            " --security-opt systempaths=unconfined`; Linux 5.14 or later), or do without:"
            " --sandbox-isolation best-effort"
        )
    if not here.complete:
        _warn(str(here))
    return here


def check_settings(args: Args, *, training: bool) -> None:
    """Raise ConfigError where this machine cannot isolate programs as `--sandbox-isolation` wants it."""
    try:
        require_isolation(args.sandbox_isolation)
    except SandboxError as error:
        raise ConfigError(f"--sandbox-isolation {args.sandbox_isolation}: {error}") from error


@functools.cache
def _warn(missing: str) -> None:
    logger.warning("sandboxes on this machine are not complete (--sandbox-isolation best-effort): %s", missing)
