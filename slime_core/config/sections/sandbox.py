"""Settings of sandboxes, for generate functions that run what a model wrote."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from slime_core.config.sections.base import Section


class SandboxArgs(Section):
    """Sandboxes."""

    sandbox_isolation: Literal["require", "best-effort"] = "require"
    """require: the run does not start where a sandbox cannot be isolated completely; best-effort: it starts, and a
    warning says what is missing."""
    sandbox_concurrency: Annotated[int, Field(gt=0)] = 32
    """Sandboxes that a rollout process keeps at once; one that is needed by another sample is given up, and rebuilt
    from what ran in it."""
