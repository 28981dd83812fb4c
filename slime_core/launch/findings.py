"""One line of a preflight's report, and how bad it is; what a plugin adds to the report."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from slime_core.types import Sample


class Level(StrEnum):
    """How bad a finding is."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    subject: str
    """What was looked at: "components", "data", ..."""
    level: Level
    message: str


class Probe(Protocol):
    """What the hook `slime_preflight` answers: it works beside the core's checks, which read the data meanwhile."""

    def begin(self, sample: Sample | None) -> None:
        """Told once: a row of the data; None where none could be read."""

    def findings(self) -> Iterable[Finding]:
        """Asked after the core's checks; has deadlines of its own."""

    def close(self) -> None:
        """In any case: leave nothing behind."""
