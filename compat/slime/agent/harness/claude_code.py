"""`slime.agent.harness.claude_code`: run Claude Code without prompts against an `AnthropicAdapter`."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping

from slime import _missing
from slime.agent.harness.common import BaseHarness, HarnessContext
from slime.agent.sandbox import Sandbox


class ClaudeCodeHarness(BaseHarness):
    """A harness that runs `claude -p PROMPT`."""

    name = "claude_code"
    executable = "claude"
    extra_args_env = "SLIME_AGENT_CC_EXTRA_ARGS"
    extra_envs_env = "SLIME_AGENT_CC_EXTRA_ENVS"

    async def write_config(self, sb: Sandbox, ctx: HarnessContext) -> None:
        """Write settings that answer the program's first-start questions."""
        answered = json.dumps({"hasCompletedOnboarding": True, "bypassPermissionsModeAccepted": True})
        for path in (f"{ctx.home}/.claude.json", f"{ctx.home}/.claude/settings.json"):
            await sb.write_file(path, answered)

    def command(self, ctx: HarnessContext, prompt: str) -> tuple[str, Mapping[str, str]]:
        """Return the command for one prompt, with every tool allowed and events as JSON."""
        flags = "--permission-mode bypassPermissions --output-format stream-json --verbose"
        return f"claude -p {shlex.quote(prompt)} {flags}", {
            "ANTHROPIC_BASE_URL": ctx.adapter_url,
            "ANTHROPIC_AUTH_TOKEN": ctx.session_id,
            "ANTHROPIC_MODEL": ctx.model_label,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "NO_PROXY": "127.0.0.1,localhost",
        }


CLAUDE_CODE = ClaudeCodeHarness()
"""Shared instance of the harness."""

__all__ = ["CLAUDE_CODE", "ClaudeCodeHarness"]
__getattr__ = _missing.names(__name__)
