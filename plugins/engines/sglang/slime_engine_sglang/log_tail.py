"""A server's log -> the lines that a person wants to see first when the server did not come up."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

_BYTES = 64 * 1024
_SHOWN = 300
"""Characters of a line: SGLang writes all of its arguments into one."""
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_ERROR = re.compile(
    r"^(?:\[[^\]]*\] )?(?:[\w.]+(?:Error|Exception|Interrupt|Exit)\b.*|\S+: error: .*|.* panicked at .*)"
)
_ADDRESS_IN_USE = re.compile(r"address already in use|EADDRINUSE|port is already in use", re.IGNORECASE)


@dataclass(frozen=True)
class LogTail:
    """The last lines that one start of a program wrote."""

    path: Path
    lines: tuple[str, ...]

    @classmethod
    def of(cls, path: Path, begin: int = 0) -> LogTail:
        """Read the last 64 KiB of what was written from byte `begin` on; nothing when there is no such file."""
        try:
            with path.open("rb") as file:
                file.seek(max(begin, file.seek(0, os.SEEK_END) - _BYTES))
                text = _COLOUR.sub("", file.read().decode(errors="replace"))
        except FileNotFoundError:
            text = ""
        return cls(path, tuple(line.rstrip() for line in text.splitlines() if line.strip()))

    @property
    def cause(self) -> str:
        """The line that names the error: a traceback's or a parser's last; else the last line; "" without any."""
        for line in reversed(self.lines):
            if _ERROR.match(line):
                return line.strip()
        return self.lines[-1].strip() if self.lines else ""

    @property
    def address_in_use(self) -> bool:
        """Whether it failed because somebody else had taken a port."""
        return any(_ADDRESS_IN_USE.search(line) for line in self.lines)

    def describe(self, count: int = 20) -> str:
        """The cause, where the log is, and its last `count` lines."""
        if not self.lines:
            return f"it wrote nothing to {self.path}"
        return f"{_short(self.cause)}\n  {self.end(count)}"

    def end(self, count: int = 20) -> str:
        """Where the log is, and its last `count` lines: for a program that did not end by an error of its own."""
        if not self.lines:
            return f"it wrote nothing to {self.path}"
        shown = "\n".join(f"    {_short(line)}" for line in self.lines[-count:])
        return f"last lines of {self.path}:\n{shown}"


def _short(line: str) -> str:
    return line if len(line) <= _SHOWN else f"{line[:_SHOWN]}..."
