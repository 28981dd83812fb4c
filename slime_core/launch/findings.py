"""Findings of the checks before a run starts: the lines of the report, and how a run reacts to them."""

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


def preflight(run: Prepared) -> list[Finding]:
    """Return the findings of all plugins (hook `slime_preflight`) for a run with valid settings and components."""
    with waiting("the checks before the run", deadline=None, then="each has a deadline of its own"):
        told: list[Iterable[Finding]] = run.hooks.slime_preflight(run=run)
        return [finding for findings in told for finding in findings]


def run_preflight(run: Prepared) -> None:
    """Run the preflight checks and log warnings. Raises ConfigError with every error found."""
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
