"""`slime.agent.harness`: coding agents that run in a sandbox and talk to an adapter."""

from __future__ import annotations

from slime import _missing
from slime.agent.harness.claude_code import CLAUDE_CODE, ClaudeCodeHarness
from slime.agent.harness.codex import CODEX, CodexHarness
from slime.agent.harness.common import BaseHarness, HarnessContext

__all__ = ["CLAUDE_CODE", "CODEX", "BaseHarness", "ClaudeCodeHarness", "CodexHarness", "HarnessContext"]
__getattr__ = _missing.names(__name__)
