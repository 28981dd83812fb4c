"""`Finding`: a line of the report on a run before it starts; hooks `slime_preflight` return findings."""

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
