"""Agents by base URL: an unmodified program that knows a base URL and an API key becomes trajectories.

    server = AgentServer(engine, tokenizer, parser=parser)
    await server.start()
    session = server.open_session(sample, sampling_params)        # session.key is the program's API key
    ...                                                           # the program talks to server.url
    samples = await server.finish_session(session.key, reward)
    await server.stop()

`server.py` has the endpoints, `answering.py` one request, `tree.py` the messages, `linearise.py` what becomes of them,
`harness.py` runs a program per sample; `Trajectory` puts turns together in code of your own, too. The generator plugin
`agent` uses them. A session may become several samples; they share a `rollout_id`, so that the run counts once.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slime_agent_base_url.harness import AgentPlan, run_agent, serving
    from slime_agent_base_url.server import AgentServer
    from slime_agent_base_url.sessions import Session, SessionLimits
    from slime_agent_base_url.trajectory import Trajectory

_EXPORTS = {
    "AgentPlan": "slime_agent_base_url.harness",
    "run_agent": "slime_agent_base_url.harness",
    "serving": "slime_agent_base_url.harness",
    "AgentServer": "slime_agent_base_url.server",
    "Session": "slime_agent_base_url.sessions",
    "SessionLimits": "slime_agent_base_url.sessions",
    "Trajectory": "slime_agent_base_url.trajectory",
}
__all__ = ["AgentPlan", "AgentServer", "Session", "SessionLimits", "Trajectory", "run_agent", "serving"]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'slime_agent_base_url' has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)
