"""The settings of a run for which nothing was given, but for what a test changes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from slime_core.config.spec import flag_specs


def engine_args(**changes: Any) -> Any:
    """Every setting at its default, as an engine is given them."""
    return SimpleNamespace(**{name: spec.default for name, spec in flag_specs().items()} | changes)
