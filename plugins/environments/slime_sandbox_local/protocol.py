"""The interface of a sandbox, for all providers: run a command, write a file, read a file; limits of a local one.

Method names and parameters match THUDM/slime's agent sandboxes, so code written for them can be ported. A failed
command returns a result with its exit status. `SandboxError` means that the sandbox could not perform the operation,
or, with `check=True`, that the command failed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Protocol, Self, runtime_checkable

from slime_core.errors import SlimeError

TIMED_OUT = -1
"""Value of `ExecResult.code` for a command that exceeded its time limit."""


class SandboxError(SlimeError, RuntimeError):
    """Raised if the sandbox could not start, has ended, or could not perform an operation."""


class ExecResult(NamedTuple):
    """The result of a command; unpacks as `(code, out, err)`."""

    code: int
    """Exit status; 128 + n if signal n ended the command; `TIMED_OUT` if it exceeded its time limit."""
    out: str
    """Standard output, truncated at the limit."""
    err: str
    """Standard error, truncated at the limit."""

    @property
    def timed_out(self) -> bool:
        """True if the command exceeded its time limit."""
        return self.code == TIMED_OUT


@runtime_checkable
class Sandbox(Protocol):
    """An isolated environment; an async context manager that ends all its processes on exit."""

    async def exec(
        self,
        cmd: str | Sequence[str],
        *,
        user: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float,
        check: bool = False,
        idempotent: bool = False,
    ) -> ExecResult:
        """Run a command in the working directory, to its end or for `timeout` seconds.

        Args:
            cmd: A shell command line, or a program with its arguments.
            user: User that runs the command; None for the sandbox's own user.
            env: Environment variables in addition to the sandbox's.
            timeout: Time limit in seconds; then the command and its processes are killed, and the code is `TIMED_OUT`.
            check: Raise SandboxError when the code is not 0.
            idempotent: True if the command may be retried when the connection to the sandbox fails. A local sandbox
                ignores this option, since it has no such connection.

        Raises:
            SandboxError: The sandbox has ended, or the command failed with `check`.
        """

    async def write_file(self, path: str, data: str | bytes | Path) -> None:
        """Write text (UTF-8), bytes, or the content of a local file; missing directories are created.

        Raises:
            SandboxError: The file cannot be written.
        """

    async def read_file(self, path: str) -> bytes:
        """Return the whole content. Raises SandboxError if the file is missing, unreadable or larger than the limit."""

    async def __aenter__(self) -> Self:
        """Start the sandbox."""

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End all processes of the sandbox."""


@dataclass(frozen=True)
class SandboxLimits:
    """Limits of one sandbox; megabytes are 2**20 bytes."""

    memory_mb: int = 1024
    """Address space of a process, and resident memory of all processes together."""
    disk_mb: int = 64
    """All files that the sandbox writes, together; without namespaces they are watched (`inside/disk.py`)."""
    file_mb: int = 16
    """Size of one file."""
    processes: int = 32
    """Number of processes and threads at a time."""
    open_files: int = 128
    """Number of file descriptors of a process."""
    stack_mb: int = 8
    """Stack size of a process; deep recursion in C needs more."""
    cpu_seconds: float = 600.0
    """CPU time of one process."""
    output_kb: int = 64
    """Size kept of standard output, and of standard error, of one command; the rest is read and dropped."""
    network: bool = False
    """Access to the host's network; without it not even the host's loopback is reachable."""
    endpoints: dict[int, tuple[str, int]] = field(default_factory=dict)
    """Host and port outside to which connections to a port on 127.0.0.1 inside are forwarded, by inside port. No other
    address is reachable. For an agent that uses one server."""
    read_only: tuple[str, ...] = ()
    """Further host directories and files, read-only under the same path; they must be readable by all users."""
