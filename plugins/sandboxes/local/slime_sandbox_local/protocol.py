"""What a sandbox can do, whoever provides it: run a command, write a file, read a file.

Method names and parameters are those of THUDM/slime's agent sandboxes, so code written for them ports. A command that
fails is a result with its exit status; `SandboxError` means that the sandbox itself could not do what was asked, and
with `check=True` that the command failed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Protocol, Self, runtime_checkable

from slime_core.errors import SlimeError

TIMED_OUT = -1
"""`ExecResult.code` of a command that was ended because its time was up."""


class SandboxError(SlimeError, RuntimeError):
    """The sandbox could not be started, is gone, or could not do what was asked."""


class ExecResult(NamedTuple):
    """How a command ended; unpacks as `(code, out, err)`."""

    code: int
    """Exit status; 128 + n when signal n ended it; `TIMED_OUT` when its time was up."""
    out: str
    """Standard output, the first part of it where it was longer than the limit."""
    err: str
    """Standard error, likewise."""

    @property
    def timed_out(self) -> bool:
        """Whether it was ended because its time was up."""
        return self.code == TIMED_OUT


@runtime_checkable
class Sandbox(Protocol):
    """One isolated place; an asynchronous context manager whose end ends everything in it."""

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
            user: Who runs it; None is the sandbox's own user.
            env: Variables on top of the sandbox's.
            timeout: Seconds; then the command and what it started are killed, and the code is `TIMED_OUT`.
            check: Raise SandboxError when the code is not 0.
            idempotent: May be tried again when the transport to the sandbox failed. Without meaning for a local one,
                which has no transport that fails and comes back.

        Raises:
            SandboxError: The sandbox is gone; or `check`.
        """

    async def write_file(self, path: str, data: str | bytes | Path) -> None:
        """Write text (UTF-8), bytes, or the content of a local file; missing directories are made.

        Raises:
            SandboxError: It cannot be written there.
        """

    async def read_file(self, path: str) -> bytes:
        """The whole content. Raises SandboxError: no such file, not readable, or larger than the limit."""

    async def __aenter__(self) -> Self:
        """Start it."""

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End everything in it."""
