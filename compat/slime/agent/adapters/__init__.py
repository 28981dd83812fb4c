"""`slime.agent.adapters`: `AnthropicAdapter`, `OpenAIAdapter` and what they have in common."""

from __future__ import annotations

from slime import _missing
from slime.agent.adapters.anthropic import AnthropicAdapter
from slime.agent.adapters.common import BaseAdapter
from slime.agent.adapters.openai import OpenAIAdapter, ResponsesAdapter

__all__ = ["AnthropicAdapter", "BaseAdapter", "OpenAIAdapter", "ResponsesAdapter"]
__getattr__ = _missing.names(__name__)
