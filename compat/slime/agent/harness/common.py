"""`slime.agent.harness.common.BaseHarness`: configure a program in a sandbox, run it, and return its exit status.

The program is not installed here. It must exist in the sandbox (a `LocalSandbox` has this machine's programs). A
sandbox without network reaches the adapter only through `SandboxLimits.endpoints`.
"""

from __future__ import annotations

import json
import os
import shlex
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from slime import _missing
from slime.agent.sandbox import Sandbox, SandboxError, ensure_agent_user, exec_and_wait
from slime_core.errors import ConfigError

HOME = "agent-home"
"""Name of the program's home below its working directory, which holds its settings."""


@dataclass(frozen=True)
class HarnessContext:
    """Settings of one run of a harness."""

    workdir: str
    """Working directory in the sandbox."""
    session_id: str
    """API key from `adapter.open_session`."""
    adapter_url: str
    """URL of the adapter for programs in the sandbox, without `/v1`."""
    model_label: str = "slime-actor"

    @property
    def home(self) -> str:
        """The program's home directory."""
        return f"{self.workdir}/{HOME}"


class BaseHarness(ABC):
    """Base class of coding agents with a command line."""

    name: ClassVar[str] = ""
    executable: ClassVar[str] = ""
    extra_args_env: ClassVar[str] = ""
    """Environment variable of this process whose value is added to the command line."""
    extra_envs_env: ClassVar[str] = ""
    """Environment variable of this process with a JSON object of variables for the program."""

    async def install_cli(self, sb: Sandbox) -> None:
        """Check that the program exists.

        Raises:
            SandboxError: The program does not exist.
        """
        code, _, _ = await sb.exec(f"command -v {self.executable}", timeout=60)
        if code:
            raise SandboxError(
                f"harness {self.name}: there is no program {self.executable!r} in the sandbox; put it into its image,"
                " or on this machine where the sandbox is local"
            )

    @abstractmethod
    async def write_config(self, sb: Sandbox, ctx: HarnessContext) -> None:
        """Write the program's settings."""

    @abstractmethod
    def command(self, ctx: HarnessContext, prompt: str) -> tuple[str, Mapping[str, str]]:
        """Return the command line and its environment variables."""

    async def launch_and_wait(self, sb: Sandbox, ctx: HarnessContext, prompt: str, time_budget_sec: float) -> int:
        """Run the program and return its exit status, or `EXIT_TIME_BUDGET_EXCEEDED`.

        Raises:
            ConfigError: The value of `extra_envs_env`'s variable is not a JSON object.
            SandboxError: The sandbox is gone.
        """
        line, variables = self.command(ctx, prompt)
        more = os.environ.get(self.extra_args_env, "").strip()
        env = {"HOME": ctx.home, **variables, **self._more_variables()}
        return await exec_and_wait(
            sb, f"{line} {more}".strip(), env=env, time_budget_sec=time_budget_sec, workdir=ctx.workdir
        )

    def _more_variables(self) -> dict[str, str]:
        text = os.environ.get(self.extra_envs_env, "").strip()
        try:
            found = json.loads(text) if text else {}
        except json.JSONDecodeError as error:
            raise ConfigError(f'{self.extra_envs_env} is no JSON: {error}; type \'{{"NAME": "value"}}\'') from error
        if not isinstance(found, dict):
            raise ConfigError(f'{self.extra_envs_env} is {type(found).__name__}; type \'{{"NAME": "value"}}\'')
        return {str(name): str(value) for name, value in found.items()}

    async def run(
        self,
        sb: Sandbox,
        *,
        workdir: str,
        session_id: str,
        adapter_url: str,
        time_budget_sec: float,
        prompt: str,
    ) -> int:
        """Configure and run the program and return its exit status. Raises as `launch_and_wait`."""
        await ensure_agent_user(sb, workdir)
        ctx = HarnessContext(workdir, session_id, adapter_url)
        await sb.exec(f"mkdir -p {shlex.quote(ctx.home)}", timeout=60, check=True)
        await self.write_config(sb, ctx)
        return await self.launch_and_wait(sb, ctx, prompt, time_budget_sec)


__all__ = ["BaseHarness", "HarnessContext"]
__getattr__ = _missing.names(__name__)
