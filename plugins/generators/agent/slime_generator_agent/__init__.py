"""An unmodified agent program per sample: it knows a base URL and an API key, and its talk becomes trajectories.

::

    sample -> sandbox, program with OPENAI_BASE_URL and ANTHROPIC_BASE_URL -> test -> samples of one rollout id

The model sees what the program sends it, not the row's prompt. The program finds the row in `task.json`; the ids of the
returned samples begin with whatever the program asked first.

Options (`plugins: {agent: ...}`), each of which a row may override in `metadata["agent_options"]`, are in `Options`.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from slime_core import Args, GenerateContext, PluginOptions, Sample, options
from slime_core.errors import ConfigError


class Options(PluginOptions):
    """What a user may set: `--set plugins.agent.command="python3 agent.py"`."""

    command: str | None = None
    """Shell command line of the program, run in the sandbox. This, or `program`."""
    program: str | None = None
    """Path to `async fn(args, sample, *, base_url, api_key, sandbox)`, called in the rollout's process."""
    files: dict[str, str] = Field(default_factory=dict)
    """Path in the sandbox -> file of this machine, written before the program starts."""
    env: dict[str, str] = Field(default_factory=dict)
    """Further variables of the program."""
    timeout: float = Field(600.0, gt=0)
    """Seconds of the program; then it is killed, and tested as it stands."""
    test_command: str | None = None
    """Shell command line that tests what the program did; without one the run's reward scores the samples."""
    test_files: dict[str, str] = Field(default_factory=dict)
    """Like `files`, written after the program has ended."""
    test_timeout: float = Field(60.0, gt=0)
    """Seconds of the test."""
    reward: Literal["exit_code", "printed"] = "exit_code"
    """1.0 when the test's exit status is 0, else 0.0; or the number at the end of its last line."""
    max_turns: int = Field(50, gt=0)
    """Answers per sample; one more is 429."""
    fork_threshold_tokens: int = Field(1024, ge=0)
    """An answer of fewer tokens that the program rewrote is dropped from its trajectory; a longer one makes a fork."""
    client_sampling: bool = False
    """Take temperature and top_p of requests; in evaluation only."""
    memory_mb: int = Field(2048, gt=0)
    """Memory of all processes in the sandbox."""
    processes: int = Field(64, gt=0)
    """Processes and threads in the sandbox."""
    isolation: Literal["require", "best-effort", "none"] = "require"
    """As --sandbox-isolation: whether to refuse where something of the sandbox cannot be had, or do without."""
    sandbox_path: str | None = None
    """Another sandbox: a path to fn(args, sample, url) -> (sandbox, url inside)."""
    log_characters: int = Field(4000, ge=0)
    """Of each output of program and test that are kept in the sample's metadata."""


async def generate(
    args: Args, sample: Sample, sampling_params: dict[str, Any], *, context: GenerateContext
) -> list[Sample]:
    """Run the program, and test what it did; see `slime_agent_base_url.run_agent`.

    `max_new_tokens` counts everything after the first prompt of a conversation.

    Raises:
        ConfigError: An option is wrong, or there is no program.
        PluginError: `program` or `sandbox_path` cannot be loaded.
        SandboxError: The sandbox could not be started, or is gone.
    """
    from slime_agent_base_url import AgentPlan, SessionLimits, run_agent  # an HTTP server: not for `slime plugins list`
    from slime_sandbox_local import SandboxLimits

    own = _options(args, sample)
    limits = SessionLimits(
        max_turns=own.max_turns,
        max_response_tokens=int(sampling_params["max_new_tokens"]),
        max_context_tokens=await _context_length(args, context),
        fork_threshold_tokens=own.fork_threshold_tokens,
        client_sampling=own.client_sampling,
    )
    plan = AgentPlan(
        command=own.command,
        program=own.program,
        files=own.files,
        env=own.env,
        timeout=own.timeout,
        test_command=own.test_command,
        test_files=own.test_files,
        test_timeout=own.test_timeout,
        reward=own.reward,
        limits=limits,
        sandbox=SandboxLimits(memory_mb=own.memory_mb, processes=own.processes),
        isolation=own.isolation,
        sandbox_path=own.sandbox_path,
        log_characters=own.log_characters,
    )
    return await run_agent(args, sample, sampling_params, context, plan)


def _options(args: Args, sample: Sample) -> Options:
    own, row = options(args, "agent", Options), sample.metadata.get("agent_options")
    if not row:
        return own
    if not isinstance(row, dict):
        raise ConfigError(f"agent: the row's agent_options is {type(row).__name__}; expected options by name")
    return Options.model_validate({**own.model_dump(), **row})


async def _context_length(args: Args, context: GenerateContext) -> int:
    """The run's limit, or the engine's."""
    name = "eval_max_context_len" if context.evaluation else "rollout_max_context_len"
    limits = [getattr(args, name, None), (await context.engine.info()).get("max_context_length")]
    return min(int(limit) for limit in limits if limit)
