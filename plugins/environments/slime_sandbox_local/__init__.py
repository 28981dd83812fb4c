"""A place to run programs that a model wrote: files, processes and memory of their own, and no way out.

    async with LocalSandbox(SandboxLimits(memory_mb=512)) as box:
        code, out, err = await box.exec("python3 solve.py", timeout=30)

`protocol.py` says what a sandbox is; `local.py` is the one that Linux namespaces make on this machine, started by
`keeper.py`; `isolation.py` says what this machine can isolate, before a run begins. Generate functions, agent harnesses
and the reward `code` use it. A sandbox is entered (`async with`) before anything runs, and leaving it ends every
process that it ever started.
"""

from slime_sandbox_local.interpreter import Interpreter, Ran
from slime_sandbox_local.isolation import Isolation, check_settings, isolation_here, require_isolation
from slime_sandbox_local.local import LocalSandbox
from slime_sandbox_local.pool import Call, InterpreterPool, pool_of
from slime_sandbox_local.protocol import ExecResult, Sandbox, SandboxError, SandboxLimits

__all__ = [
    "Call",
    "ExecResult",
    "Interpreter",
    "InterpreterPool",
    "Isolation",
    "LocalSandbox",
    "Ran",
    "Sandbox",
    "SandboxError",
    "SandboxLimits",
    "check_settings",
    "isolation_here",
    "pool_of",
    "require_isolation",
]
