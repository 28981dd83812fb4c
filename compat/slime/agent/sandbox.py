"""`slime.agent.sandbox`: what an agent's sandbox can do, for code that brings its own or takes slime_core's.

`Sandbox` is `slime_sandbox_local.Sandbox`, which has THUDM/slime's methods. There is no client of E2B's service here;
`LocalSandbox` isolates on this machine, and a class of one's own with the three methods fits wherever a sandbox is
taken; the environment variable `SLIME_E2B_SANDBOX` names the one that code made for `E2BSandbox` gets.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from typing import Any

from slime_sandbox_local import ExecResult, LocalSandbox, Sandbox, SandboxError
from slime_sandbox_local.protocol import TIMED_OUT

from slime import _missing
from slime.utils.misc import load_function

EXIT_TIME_BUDGET_EXCEEDED = TIMED_OUT
"""Exit status of what was ended because its time was up."""


_STAND_IN = "SLIME_E2B_SANDBOX"
"""Environment variable that names the class to use in place of `E2BSandbox`, as `pkg.mod:Class` or `file.py:Class`."""


class E2BSandbox:
    """E2B's service, which slime-compat has no client of: the class that `_STAND_IN` names gets the same arguments.

    Raises:
        SandboxError: The variable is not set. Code that only names this class can be imported.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make an object of the class that stands in."""
        if spec := os.environ.get(_STAND_IN):
            return load_function(spec)(*args, **kwargs)
        raise SandboxError(
            f"slime-compat has no E2BSandbox; set {_STAND_IN}=file.py:Class to a class that takes its arguments (image,"
            " ...) and has exec, write_file and read_file, over LocalSandbox or e2b's client"
        )


async def ensure_agent_user(sb: Sandbox, workdir: str) -> None:
    """See that the directory is there, and that git trusts it. Programs of a local sandbox have no rights to drop.

    Raises:
        SandboxError: The directory cannot be made.
    """
    trusted = 'git config --global --add safe.directory "*" 2>/dev/null || true'
    await sb.exec(f"mkdir -p {shlex.quote(workdir)} && ({trusted})", timeout=60, check=True)


async def exec_and_wait(
    sb: Sandbox, cmd: str, *, env: Mapping[str, str] | None = None, time_budget_sec: float, workdir: str | None = None
) -> int:
    """Run a command to its end; its exit status, or `EXIT_TIME_BUDGET_EXCEEDED`.

    Raises:
        SandboxError: The sandbox is gone.
    """
    begin = "" if workdir is None else f"cd {shlex.quote(workdir)} && "
    result = await sb.exec(begin + cmd, env=dict(env or {}), timeout=time_budget_sec)
    return int(result[0])


__all__ = [
    "EXIT_TIME_BUDGET_EXCEEDED",
    "E2BSandbox",
    "ExecResult",
    "LocalSandbox",
    "Sandbox",
    "SandboxError",
    "ensure_agent_user",
    "exec_and_wait",
]
__getattr__ = _missing.names(__name__)
