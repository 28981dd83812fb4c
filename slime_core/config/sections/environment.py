"""Settings of environments: which one samples act in, and how long its calls may take."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from slime_core.config.sections.base import Section


class EnvironmentArgs(Section):
    """Environment."""

    environment_path: str | None = None
    """What samples act in, for generators that use one (multi_turn): a plugin name or a path to a class(args); a row's
    metadata may name another as environment_path."""
    environment_step_timeout: Annotated[float, Field(gt=0)] = 60.0
    """Seconds that building, resetting, stepping or closing an environment may take each; then the sample fails, or is
    cut, as its generator declares."""
    environment_threads: Annotated[int, Field(gt=0)] = 512
    """Environments with plain methods that may exist at once, hanging ones included; each has a thread."""
