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

from typing import TYPE_CHECKING, Any

from slime_core.lazy import Exports

if TYPE_CHECKING:
    from slime_agent_base_url.harness import AgentPlan as AgentPlan
    from slime_agent_base_url.harness import run_agent as run_agent
    from slime_agent_base_url.harness import serving as serving
    from slime_agent_base_url.server import AgentServer as AgentServer
    from slime_agent_base_url.sessions import Session as Session
    from slime_agent_base_url.sessions import SessionLimits as SessionLimits
    from slime_agent_base_url.trajectory import Trajectory as Trajectory

_EXPORTS = Exports(__name__, __file__)
__all__ = ["AgentPlan", "AgentServer", "Session", "SessionLimits", "Trajectory", "run_agent", "serving"]


def __getattr__(name: str) -> Any:
    return _EXPORTS.load(name)
