"""`slime.agent.adapters.anthropic.AnthropicAdapter`: `/v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

from slime import _missing
from slime.agent.adapters.common import BaseAdapter


class AnthropicAdapter(BaseAdapter):
    """For Claude Code and other clients of Anthropic's API."""


__all__ = ["AnthropicAdapter"]
__getattr__ = _missing.names(__name__)
