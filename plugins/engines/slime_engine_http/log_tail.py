"""The lines of a server's log that explain why the server did not start."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

_BYTES = 64 * 1024
_MORE_BYTES = 16 * 1024 * 1024
_FOLLOWS = "EngineDeadError"
"""Named by the error of every request after vLLM's engine has ended; its cause is further up."""
_SHOWN = 300
"""Limit on the characters of a line: SGLang writes all of its arguments into one line."""
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_ERROR = re.compile(
    r"^(?:\(\w+ pid=\d+\) (?:ERROR [\d-]+ [\d:]+ )?)?(?:\[[^\]]*\] )?"
    r"(?P<error>[\w.]+(?:Error|Exception|Interrupt|Exit)\b.*|\S+: error: .*|.* panicked at .*)"
)
_ADDRESS_IN_USE = re.compile(r"address already in use|EADDRINUSE|port is already in use", re.IGNORECASE)


@dataclass(frozen=True)
class LogTail:
    """The last lines that a start of a program wrote."""

    path: Path
    lines: tuple[str, ...]

    @classmethod
    def of(cls, path: Path, begin: int = 0) -> LogTail:
        """Read the last 64 KiB after byte `begin`, or more if vLLM's engine ended; a missing file gives no lines."""
        text = _end_of(path, begin, _BYTES)
        if _FOLLOWS in text:
            text = _end_of(path, begin, _MORE_BYTES)
        return cls(path, tuple(line.rstrip() for line in text.splitlines() if line.strip()))

    @property
    def cause(self) -> str:
        """Line that names the error: the last line of a traceback or a parser, else the last line; "" without lines."""
        for line in reversed(self.lines):
            if _FOLLOWS not in line and (found := _ERROR.match(line)):
                return found["error"].strip()
        return self.lines[-1].strip() if self.lines else ""

    @property
    def address_in_use(self) -> bool:
        """True if the program failed because a port was in use."""
        return any(_ADDRESS_IN_USE.search(line) for line in self.lines)

    def describe(self, count: int = 20) -> str:
        """Return the cause, the log's path, and its last `count` lines."""
        if not self.lines:
            return f"it wrote nothing to {self.path}"
        return f"{_short(self.cause)}\n  {self.end(count)}"

    def end(self, count: int = 20) -> str:
        """Return the log's path and its last `count` lines, for a program that did not end with its own error."""
        if not self.lines:
            return f"it wrote nothing to {self.path}"
        shown = "\n".join(f"    {_short(line)}" for line in self.lines[-count:])
        return f"last lines of {self.path}:\n{shown}"


def _end_of(path: Path, begin: int, size: int) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(begin, file.seek(0, os.SEEK_END) - size))
            return _COLOUR.sub("", file.read().decode(errors="replace"))
    except FileNotFoundError:
        return ""


def _short(line: str) -> str:
    return line if len(line) <= _SHOWN else f"{line[:_SHOWN]}..."
