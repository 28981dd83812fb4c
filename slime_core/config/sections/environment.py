"""Settings of what samples act in and with: environments, sandboxes and tools."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt

from slime_core.config.sections.base import Components, Section, Spec


class EnvironmentArgs(Section):
    """Environment."""

    environment_path: str | None = None
    """Environment that samples act in: a plugin name or a path to a class(args); a row's metadata may name another as
    environment_path. Sets --custom-generate-function-path multi_turn."""
    environment_step_timeout: PositiveFloat = 60.0
    """Seconds that building, resetting, stepping or closing an environment may take each; then the sample fails, or is
    cut, as its generator declares."""
    environment_threads: PositiveInt = 512
    """Environments with plain methods that may exist at once, hanging ones included; each has a thread."""


class SandboxArgs(Section):
    """Sandboxes."""

    sandbox_isolation: Literal["require", "best-effort", "none"] = "require"
    """require: the run does not start where a sandbox cannot be isolated completely; best-effort: it starts with a
    warning that says what is missing, unless programs could write slime's files and memory; none: it starts, and
    programs may do all that your user may."""
    sandbox_concurrency: PositiveInt = 32
    """Sandboxes that a rollout process keeps at once; one that is needed by another sample is given up, and rebuilt
    from what ran in it."""


class ToolArgs(Section):
    """Tools."""

    tools_path: Components = Field(default_factory=list)
    """Something the model may call: a plugin name or path to a function with annotations, or to a list of them; its
    schema is given to the chat template. Repeatable."""
    tool_call_parser: Spec = "auto"
    """How the model writes tool calls: a parser's name or path; auto takes the one that knows the chat template."""
