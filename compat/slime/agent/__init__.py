"""`slime.agent`: agents that talk to the policy over HTTP, over `slime_agent_base_url`."""

from __future__ import annotations

from slime import _missing

__getattr__ = _missing.names(__name__)
