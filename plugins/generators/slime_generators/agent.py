"""Run an unmodified agent program per sample: it gets a base URL and an API key, its requests become trajectories.

::

    sample -> sandbox, program with OPENAI_BASE_URL and ANTHROPIC_BASE_URL -> test -> samples of one rollout id

The model sees the program's messages, not the row's prompt. The program finds the row in `task.json`; the token ids of
the returned samples begin with the program's first request.

`Options` has the options (`plugins: {agent: ...}`). A row may override each option in `metadata["agent_options"]`.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from slime_core import Args, GenerateContext, PluginOptions, Sample, options
from slime_core.errors import ConfigError


class Options(PluginOptions):
    """User options, such as `--set plugins.agent.command="python3 agent.py"`."""

    command: str | None = None
    """Shell command line of the program, run in the sandbox. Set either `command` or `program`."""
    program: str | None = None
    """Path to `async fn(args, sample, *, base_url, api_key, sandbox)`, called in the rollout's process."""
    files: dict[str, str] = Field(default_factory=dict)
    """Path in the sandbox -> file on this machine, written before the program starts."""
    env: dict[str, str] = Field(default_factory=dict)
    """Additional environment variables of the program."""
    timeout: float = Field(600.0, gt=0)
    """Seconds that the program may run; then it is killed, and its result so far is tested."""
    test_command: str | None = None
    """Shell command line that tests the program's result; by default the run's reward scores the samples."""
    test_files: dict[str, str] = Field(default_factory=dict)
    """Like `files`, written after the program has ended."""
    test_timeout: float = Field(60.0, gt=0)
    """Seconds that the test may run."""
    reward: Literal["exit_code", "printed"] = "exit_code"
    """Reward of the test: 1.0 if its exit status is 0, else 0.0; or the number at the end of its last line."""
    max_turns: int = Field(50, gt=0)
    """Maximum number of answers per sample; further requests get status 429."""
    fork_threshold_tokens: int = Field(1024, ge=0)
    """Length from which an answer that the program rewrote makes a fork; shorter answers leave the trajectory."""
    client_sampling: bool = False
    """Use temperature and top_p of the requests; only in evaluation."""
    memory_mb: int = Field(2048, gt=0)
    """Memory of all processes in the sandbox."""
    processes: int = Field(64, gt=0)
    """Maximum number of processes and threads in the sandbox."""
    isolation: Literal["require", "best-effort", "none"] = "require"
    """Same as --sandbox-isolation: refuse to run if the host cannot provide the whole sandbox, or run without it."""
    sandbox_path: str | None = None
    """Path to fn(args, sample, url) -> (sandbox, url inside), which replaces the default sandbox."""
    log_characters: int = Field(4000, ge=0)
    """Number of characters of each output of program and test that are kept in the sample's metadata."""


async def generate(
    args: Args, sample: Sample, sampling_params: dict[str, Any], *, context: GenerateContext
) -> list[Sample]:
    """Run the program, then its test; see `slime_agent_base_url.run_agent`.

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
    """Return the context limit of the run, or of the engine."""
    name = "eval_max_context_len" if context.evaluation else "rollout_max_context_len"
    limits = [getattr(args, name, None), (await context.engine.info()).get("max_context_length")]
    return min(int(limit) for limit in limits if limit)
