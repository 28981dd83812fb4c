"""Run an unmodified agent program for one sample: a session, a sandbox, a deadline, a test, and samples.

The generator `agent` calls `run_agent`. The reward does not depend on the program's exit status. A program that crashed
or ran out of time is tested like any other, since it may have done its work; `metadata["agent"]["program"]` has its
exit status. Only an interruption by the framework discards sampled tokens.

::

    open session -> sandbox up, files written -> program (base URL, API key) -> close session -> test -> samples
                                                  `- deadline, or the engine was interrupted: killed with the sandbox
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, TypeAlias
from weakref import WeakKeyDictionary

from slime_data.tool_parsers import tool_parser
from slime_sandbox_local import ExecResult, LocalSandbox, Sandbox, SandboxError, SandboxLimits

from slime_agent_base_url.server import AgentServer
from slime_agent_base_url.sessions import Session, SessionLimits
from slime_core.errors import ConfigError, PluginError
from slime_core.plugins.resolve import resolve
from slime_core.protocols import Args, GenerateContext
from slime_core.sample import Sample
from slime_core.waits import loop_turn, waiting, within

PORT_INSIDE = 8790
"""Port of the endpoints on the loopback interface inside a sandbox."""
TASK_FILE = "task.json"
"""File in the sandbox's working directory with the row's `prompt` and `metadata`, without its label."""
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")

Program: TypeAlias = Callable[..., Awaitable[Any]]
"""`async fn(args, sample, *, base_url, api_key, sandbox)`."""
SandboxMaker: TypeAlias = Callable[..., "tuple[Sandbox, str]"]
"""`fn(args, sample, url) -> (sandbox, url for programs inside it)`; the harness enters the sandbox."""


@dataclass(frozen=True)
class AgentPlan:
    """The program to run for a sample, its limits, and its scoring."""

    command: str | None = None
    """Shell command line, run in the sandbox."""
    program: str | None = None
    """Path to `async fn(args, sample, *, base_url, api_key, sandbox)`, called in this process instead of `command`."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Path in the sandbox -> file on this machine."""
    env: Mapping[str, str] = field(default_factory=dict)
    timeout: float = 600.0
    """Seconds that the program may run."""
    test_command: str | None = None
    """Test command, run in the same sandbox after the program; None: the run's reward scores the samples."""
    test_files: Mapping[str, str] = field(default_factory=dict)
    """Like `files`, but written just before the test, so the program never sees them."""
    test_timeout: float = 60.0
    """Seconds that the test may run."""
    reward: Literal["exit_code", "printed"] = "exit_code"
    """Reward of the test: 1.0 for exit status 0, else 0.0; or the number at the end of the test's last line."""
    limits: SessionLimits = field(default_factory=SessionLimits)
    sandbox: SandboxLimits = field(default_factory=SandboxLimits)
    isolation: str = "require"
    sandbox_path: str | None = None
    """Path to a `SandboxMaker` that replaces the default sandbox."""
    log_characters: int = 4000
    """Number of characters kept with the sample from the end of each output."""


@asynccontextmanager
async def serving(args: Args, context: GenerateContext) -> AsyncIterator[AgentServer]:
    """Yield the endpoints of this event loop's engine; the first user starts them, the last user stops them."""
    shared = _shared.setdefault(asyncio.get_running_loop(), {}).setdefault(id(context.engine), _Shared())
    shared.users += 1
    try:
        if shared.server is None:
            parser = tool_parser(args, context.tokenizer, "hermes")
            shared.server = AgentServer(context.engine, context.tokenizer, args=args, parser=parser)
            shared.started = asyncio.ensure_future(shared.server.start())
        assert shared.started is not None
        if not shared.started.done():
            await within(
                asyncio.shield(shared.started), "the agents' endpoints", deadline=60.0, then="the sample fails",
                error=SandboxError,
            )  # fmt: skip
        shared.started.result()
        await loop_turn()
        yield shared.server
    finally:
        shared.users -= 1
        if not shared.users:
            server, shared.server = shared.server, None
            _shared[asyncio.get_running_loop()].pop(id(context.engine), None)
            if server is not None and shared.started is not None:
                with waiting("the agents' endpoints", deadline=None, then="their start ends by itself"):
                    await asyncio.gather(shared.started, return_exceptions=True)
                await server.stop()


class _Shared:
    """A server and its number of users."""

    def __init__(self) -> None:
        self.users = 0
        self.server: AgentServer | None = None
        self.started: asyncio.Future[None] | None = None


_shared: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[int, _Shared]] = WeakKeyDictionary()


async def run_agent(
    args: Args, sample: Sample, sampling_params: Mapping[str, Any], context: GenerateContext, plan: AgentPlan
) -> list[Sample]:
    """Run the program once, then the test.

    Returns:
        The trajectories of the run, which share a `rollout_id` and each have the test's reward. One FAILED sample if
        the program got no answer from the policy. One ABORTED sample, without response, if the framework interrupted.

    Raises:
        ConfigError: The plan has no program, or two.
        PluginError: `program` or `sandbox_path` cannot be loaded.
        SandboxError: The sandbox could not be started, or has ended.
    """
    if (plan.command is None) == (plan.program is None):
        raise ConfigError("agent: give `command` (run in a sandbox) or `program` (a Python function), one of them")
    if plan.test_command is None and plan.test_files:
        raise ConfigError("agent: test_files without a test_command have no use")
    started = time.monotonic()
    async with serving(args, context) as server:
        session = server.open_session(sample, sampling_params, limits=plan.limits, evaluation=context.evaluation)
        try:
            sandbox, url = _sandbox(args, sample, server, plan)
            async with sandbox:
                await _write(sandbox, plan.files)
                await sandbox.write_file(TASK_FILE, _task(sample))
                ended = await _until_interrupted(session, _program(args, sample, sandbox, url, session, plan))
                await server.close_session(session.key)
                reward, tested = None, None
                if ended is not None and plan.test_command is not None:
                    reward, tested = await _test(sandbox, plan)
            samples = await server.finish_session(session.key, reward)
        finally:
            await server.drop_session(session.key)
    outside = max(0.0, time.monotonic() - started - session.engine_seconds)
    for each in samples:
        each.non_generation_time = outside / len(samples)
        notes = {"program": ended, **({"test": tested} if tested is not None else {})}
        each.metadata["agent"] = {**each.metadata.get("agent", {}), **notes}
    return samples


@lru_cache(maxsize=64)
def _loaded(path: str, origin: str) -> Callable[..., Any]:
    """Return a user's function; it is loaded once, not for each sample."""
    found: Callable[..., Any] = resolve("functions", path, origin=origin).obj
    return found


def _sandbox(args: Args, sample: Sample, server: AgentServer, plan: AgentPlan) -> tuple[Sandbox, str]:
    """Return the sandbox, not yet entered, and the endpoints' URL inside it."""
    if plan.sandbox_path is not None:
        maker: SandboxMaker = _loaded(plan.sandbox_path, "agent: sandbox_path")
        made: tuple[Sandbox, str] = maker(args, sample, server.url)
        return made
    endpoints = {**plan.sandbox.endpoints, PORT_INSIDE: (server.host, server.port)}
    limits = SandboxLimits(**{**vars(plan.sandbox), "endpoints": endpoints})
    return LocalSandbox(limits, isolation=plan.isolation), f"http://127.0.0.1:{PORT_INSIDE}"


async def _write(sandbox: Sandbox, files: Mapping[str, str]) -> None:
    for path, source in files.items():
        if not Path(source).is_file():
            raise ConfigError(f"agent: files: {path!r} is to be {source!r}, which is no file of this machine")
        await sandbox.write_file(path, Path(source))


def _task(sample: Sample) -> str:
    return json.dumps({"prompt": sample.prompt, "metadata": _plain(sample.metadata)}, ensure_ascii=False)


def _plain(value: Any) -> Any:
    """Return a value as plain JSON values; other values become strings, and so does one that JSON cannot hold."""
    try:
        return json.loads(json.dumps(value, default=str))
    except (TypeError, ValueError, RecursionError):
        return str(value)


def environment(url: str, key: str) -> dict[str, str]:
    """Return the environment variables by which the clients of both vendors find the endpoints."""
    return {
        "OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_BASE": f"{url}/v1", "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": key,
        "NO_PROXY": "127.0.0.1,localhost",
    }  # fmt: skip


async def _program(
    args: Args, sample: Sample, sandbox: Sandbox, url: str, session: Session, plan: AgentPlan
) -> dict[str, Any]:
    """Run the program to its end or its deadline; return its exit information for the sample's metadata."""
    begun = time.monotonic()
    if plan.command is not None:
        variables = {**environment(url, session.key), **plan.env}
        result = await sandbox.exec(plan.command, env=variables, timeout=plan.timeout)
        ended = _ended(result, plan)
    else:
        ended = await _function(args, sample, sandbox, url, session, plan)
    return {**ended, "seconds": round(time.monotonic() - begun, 3)}


async def _function(
    args: Args, sample: Sample, sandbox: Sandbox, url: str, session: Session, plan: AgentPlan
) -> dict[str, Any]:
    assert plan.program is not None, "checked by run_agent"
    function: Program = _loaded(plan.program, "agent: program")
    if not inspect.iscoroutinefunction(function):
        raise PluginError(f"agent: program {plan.program!r} is no `async def`; it would stand in the way of the engine")
    server_url = url if plan.sandbox_path is not None else _outside(url, sandbox)
    call = function(args, sample, base_url=server_url, api_key=session.key, sandbox=sandbox)
    try:
        result = await within(
            call, f"agent program {plan.program}", deadline=plan.timeout, then="it counts as timed out",
            error=TimeoutError,
        )  # fmt: skip
    except TimeoutError as error:
        return {"code": -1, "timed_out": True, "error": str(error)}
    except SandboxError:
        raise
    except Exception as error:  # boundary: the program's own failure is data
        return {"code": 1, "timed_out": False, "error": f"{type(error).__name__}: {error}"[-plan.log_characters :]}
    return {"code": 0, "timed_out": False, "result": _plain(result)}


def _outside(url: str, sandbox: Sandbox) -> str:
    """Return the URL for a program in this process."""
    limits = getattr(sandbox, "limits", None)
    host, port = limits.endpoints[PORT_INSIDE] if limits is not None else (None, None)
    return f"http://{host}:{port}" if host else url


async def _until_interrupted(session: Session, program: Awaitable[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the program's result; if the engine is interrupted first, cancel the program and return None."""
    run: asyncio.Task[Any] = asyncio.ensure_future(program)
    interrupted: asyncio.Task[Any] | None = None
    try:
        with waiting("an agent's program", deadline=None, then="its own deadline ends it"):
            interrupted = asyncio.ensure_future(session.aborted.wait())
            await asyncio.wait({run, interrupted}, return_when=asyncio.FIRST_COMPLETED)
        return None if session.aborted.is_set() else run.result()
    finally:
        if interrupted is not None:
            interrupted.cancel()
        if not run.done():
            run.cancel()
            await asyncio.gather(run, return_exceptions=True)
        elif session.aborted.is_set() and not run.cancelled():
            run.exception()  # of no interest any more


async def _test(sandbox: Sandbox, plan: AgentPlan) -> tuple[float, dict[str, Any]]:
    """Run the test; return (reward, exit information of the test)."""
    assert plan.test_command is not None, "checked by run_agent"
    await _write(sandbox, plan.test_files)
    result = await sandbox.exec(plan.test_command, timeout=plan.test_timeout)
    ended = _ended(result, plan)
    if plan.reward == "exit_code":
        return (1.0 if result.code == 0 else 0.0), ended
    lines = result.out.strip().splitlines()
    number = _NUMBER.fullmatch(lines[-1].split()[-1]) if lines and lines[-1].split() else None
    if number is None or result.code != 0:
        ended["problem"] = "no number ends the last line" if result.code == 0 else f"exit status {result.code}"
        return 0.0, ended
    return float(number[0]), ended


def _ended(result: ExecResult, plan: AgentPlan) -> dict[str, Any]:
    keep = plan.log_characters
    return {
        "code": result.code, "timed_out": result.timed_out,
        "stdout": result.out[-keep:] if keep else "", "stderr": result.err[-keep:] if keep else "",
    }  # fmt: skip
