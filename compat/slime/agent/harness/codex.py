"""`slime.agent.harness.codex`: non-interactive Codex that calls an `OpenAIAdapter`."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from slime import _missing
from slime.agent.harness.common import BaseHarness, HarnessContext
from slime.agent.sandbox import Sandbox


class CodexHarness(BaseHarness):
    """The harness of `codex exec PROMPT`."""

    name = "codex"
    executable = "codex"
    extra_args_env = "SLIME_AGENT_CODEX_EXTRA_ARGS"
    extra_envs_env = "SLIME_AGENT_CODEX_EXTRA_ENVS"

    async def write_config(self, sb: Sandbox, ctx: HarnessContext) -> None:
        """Write the server's address to Codex's configuration file; its variables only apply to OpenAI's servers."""
        lines = [
            f'model = "{ctx.model_label}"',
            'model_provider = "slime"',
            "[model_providers.slime]",
            'name = "slime"',
            f'base_url = "{ctx.adapter_url}/v1"',
            'env_key = "OPENAI_API_KEY"',
            'wire_api = "responses"',
        ]
        await sb.write_file(f"{ctx.home}/.codex/config.toml", "\n".join(lines) + "\n")

    def command(self, ctx: HarnessContext, prompt: str) -> tuple[str, Mapping[str, str]]:
        """Return the command for one prompt; Codex's own sandbox is off, since slime's sandbox isolates it."""
        flags = "--skip-git-repo-check --dangerously-bypass-approvals-and-sandbox --json"
        return f"codex exec {flags} {shlex.quote(prompt)}", {
            "OPENAI_API_KEY": ctx.session_id,
            "OPENAI_BASE_URL": f"{ctx.adapter_url}/v1",
            "NO_PROXY": "127.0.0.1,localhost",
        }


CODEX = CodexHarness()
"""The shared instance of the harness."""

__all__ = ["CODEX", "CodexHarness"]
__getattr__ = _missing.names(__name__)
