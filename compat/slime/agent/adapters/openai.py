"""`slime.agent.adapters.openai`: `/v1/chat/completions` and `/v1/responses`."""

from __future__ import annotations

from slime import _missing
from slime.agent.adapters.common import BaseAdapter


class OpenAIAdapter(BaseAdapter):
    """For clients of OpenAI's APIs."""


ResponsesAdapter = OpenAIAdapter
"""For Codex; every adapter has all endpoints."""

__all__ = ["OpenAIAdapter", "ResponsesAdapter"]
__getattr__ = _missing.names(__name__)
