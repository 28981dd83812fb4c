"""`Finding`: a line of the report on a run before it starts, returned by hooks `slime_preflight` and `slime_check`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """The severity of a finding."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True)
class Finding:
    """A line of the report."""

    subject: str
    """Subject of the check: "components", "data", ..."""
    level: Level
    message: str
