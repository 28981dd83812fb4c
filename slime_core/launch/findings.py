"""What is found wrong with a run before it starts: the lines of the report, and what a run makes of them."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from slime_core.distributions import BUNDLE
from slime_core.errors import ConfigError
from slime_core.waits import waiting

if TYPE_CHECKING:
    from slime_core.launch.prepare import Prepared

logger = logging.getLogger(__name__)


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


def preflight(run: Prepared) -> list[Finding]:
    """What plugins find of a run whose settings are valid and whose components are there (hook `slime_preflight`)."""
    with waiting("the checks before the run", deadline=None, then="each has a deadline of its own"):
        told: list[Iterable[Finding]] = run.hooks.slime_preflight(run=run)
        return [finding for findings in told for finding in findings]


def run_preflight(run: Prepared) -> None:
    """Log warnings. Raises ConfigError with every error found."""
    if not run.hooks.implemented("slime_preflight"):
        logger.warning("nothing installed checks a run before it starts; slime's checks: pip install %s", BUNDLE)
    findings = preflight(run)
    for finding in findings:
        if finding.level == Level.WARNING:
            logger.warning("%s: %s", finding.subject, finding.message)
    errors = [f for f in findings if f.level == Level.ERROR]
    if errors:
        lines = [f"{f.subject}: {f.message}" for f in errors]
        raise ConfigError("\n".join([*lines, "(`slime check` prints the whole report; --no-preflight goes on)"]))
