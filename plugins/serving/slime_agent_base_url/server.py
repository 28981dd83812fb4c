"""HTTP endpoints for an unmodified agent program to call the policy, and the samples made from its requests.

A harness starts a server in the rollout's event loop and opens a session per sample::

    program --HTTP--> front --AgentDesk--ids--> engine        one event loop: the engine's methods belong to it, and
       ^    <-- JSON or events <-- Answer <-- tokens           handlers only wait and translate; templates use threads
       |                        |
       key = session            `-- MessageTree --finish_session--> samples

The routes are the front's (`slime_serving.front`), without `/v1/completions` and with `/healthz`. The API key
alone identifies the session of a request. There is no default session: a request with an unknown key gets 401, from
any address.
"""

from __future__ import annotations

import asyncio
import copy
import json
import secrets
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from slime_serving.front.answer import TurnReader
from slime_serving.front.app import add_front
from slime_serving.http.application import application, bind, listen
from slime_serving.http.errors import Refused, explain
from slime_serving.http.guard import Access

from slime_agent_base_url.answering import AgentDesk
from slime_agent_base_url.linearise import Line, Step, linearise
from slime_agent_base_url.prompts import PromptWriter
from slime_agent_base_url.sessions import Session, SessionLimits
from slime_core.protocols import Args, RolloutEngine
from slime_core.sample import Sample, SampleStatus
from slime_core.tools import ToolParser
from slime_core.waits import loop_turn, waiting

_CLOSING_S = 5.0
"""Seconds for cancelled requests to end."""
_MOST_CONTEXT = 1 << 20


class AgentServer:
    """A server with its endpoints, sessions and samples."""

    def __init__(
        self,
        engine: RolloutEngine,
        tokenizer: Any,
        *,
        args: Args | None = None,
        parser: ToolParser | None = None,
        model_name: str = "policy",
        check_drift: bool = True,
    ) -> None:
        """
        Args:
            engine: A started engine; its methods are called in the loop that `start` is called in.
            tokenizer: A tokenizer with a chat template.
            args: The run's settings; read for `apply_chat_template_kwargs`, `content_special_tokens` and the context
                length.
            parser: Parser of the model's tool calls; None: requests with tools are refused.
            model_name: Model name in `/v1/models`; requests may name any model.
            check_drift: Count prompts that the template would render differently.
        """
        self.args = args
        self.writer = PromptWriter(tokenizer, args, check=check_drift)
        self.sessions: dict[str, Session] = {}
        reader = TurnReader(tokenizer, parser)
        self.desk = AgentDesk(engine, self.writer, reader, self.sessions, model_name, context_of(args, tokenizer))
        self._stop: Callable[[], Awaitable[None]] | None = None
        self.host, self.port = "127.0.0.1", 0

    # -- life ----------------------------------------------------------------------------------------

    def application(self) -> FastAPI:
        """Return the endpoints as an app, for a caller with its own HTTP server in the engine's loop."""
        # The key identifies the session, so any host name by which a sandbox reaches this machine is accepted.
        app = application(Access(hosts=frozenset({"*"})))
        add_front(app, self.desk, completions=False)
        app.state.refuses = self._refuses

        @app.get("/healthz")
        async def healthz() -> dict[str, Any]:
            return {"status": "ok", "sessions": len(self.sessions)}

        return app

    def _refuses(self, request: Request, body: Any, errors: Any) -> Refused:
        """Return the error for a body that fits no API, and note it in the request's session, if it has one."""
        try:
            session = self.desk.caller(request.headers, body if isinstance(body, Mapping) else {})
        except Refused as stranger:
            return stranger
        problem = Refused(400, explain(errors))
        self.desk.refused(session, (), problem)
        return problem

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """Listen; port 0 takes a free port. Raises EngineError if the address is not available."""
        await asyncio.to_thread(self.writer.warm_up)
        self.host, self.port, self._stop = await listen(self.application(), bind(host, port))

    async def stop(self) -> None:
        """Close every session and stop listening; safe to call twice."""
        for key in list(self.sessions):
            await self.drop_session(key)
        stop, self._stop = self._stop, None
        if stop is not None:
            await stop()

    @property
    def url(self) -> str:
        """Address for ANTHROPIC_BASE_URL; OPENAI_BASE_URL adds `/v1`."""
        return f"http://{self.host}:{self.port}"

    # -- sessions ------------------------------------------------------------------------------------

    def open_session(
        self,
        base: Sample,
        sampling_params: Mapping[str, Any],
        *,
        key: str | None = None,
        limits: SessionLimits | None = None,
        evaluation: bool = False,
    ) -> Session:
        """Open and return a session; its `key` is the API key. Raises ValueError for a key that is in use."""
        key = key or f"sk-slime-{secrets.token_urlsafe(24)}"
        if key in self.sessions:
            raise ValueError(f"session {key!r} is open already")
        session = Session(key, base, dict(sampling_params), limits or SessionLimits(), evaluation)
        self.sessions[key] = session
        return session

    async def close_session(self, key: str) -> None:
        """Refuse further requests with 503 and cancel the running ones."""
        session = self.sessions[key]
        session.closed = True
        running = set(session.running)
        for task in running:
            task.cancel()
        if running:
            with waiting("requests of a closed session", deadline=_CLOSING_S, then="they are left behind"):
                await asyncio.wait(running, timeout=_CLOSING_S)

    async def drop_session(self, key: str) -> None:
        """Close it and forget it; what was sampled is lost."""
        if key in self.sessions:
            await self.close_session(key)
            del self.sessions[key]

    async def finish_session(self, key: str, reward: float | dict[str, Any] | None = None) -> list[Sample]:
        """Close a session and return its trajectories as samples that share a `rollout_id`, each with the run's reward.

        If nothing was sampled: one FAILED sample without response. If the engine interrupted the session: one ABORTED
        sample, unchanged.
        """
        await self.close_session(key)
        session = self.sessions.pop(key)
        await loop_turn()
        return session_samples(session, reward, self.args)


def context_of(args: Args | None, tokenizer: Any) -> int:
    """Return the maximum number of tokens of a conversation, if known; it bounds the rendered text."""
    settings = {} if args is None else vars(args)  # settings made by hand may lack some
    file = Path(settings.get("hf_checkpoint") or "") / "config.json"
    config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    positions = config.get("text_config", config).get("max_position_embeddings")
    known = (settings.get("rollout_max_context_len"), positions, getattr(tokenizer, "model_max_length", None))
    return min([int(length) for length in known if length and length < _MOST_CONTEXT], default=_MOST_CONTEXT)


def session_samples(session: Session, reward: float | dict[str, Any] | None, args: Args | None) -> list[Sample]:
    """Return a closed session's samples; see `AgentServer.finish_session`."""
    base = session.base
    if session.aborted.is_set():
        aborted = copy.deepcopy(base)
        aborted.reset_for_retry()
        aborted.status = SampleStatus.ABORTED
        return [aborted]
    lines = linearise(session.tree.paths(), fork_threshold=session.limits.fork_threshold_tokens, args=args)
    if not lines:
        failed = copy.deepcopy(base)
        reasons = "; ".join(session.errors[-3:]) or "it asked for none"
        failed.fail("agent", f"the program got no answer: {reasons}")
        failed.metadata["agent"] = session.summary()
        return [failed]
    shared = base.rollout_id if base.rollout_id is not None else base.index
    return [_sample(session, line, n, len(lines), shared, reward) for n, line in enumerate(lines)]


def _sample(
    session: Session, line: Line, number: int, total: int, shared: int | None, reward: float | dict[str, Any] | None
) -> Sample:
    sample = copy.deepcopy(session.base)
    sample.reset_for_retry()
    line.trajectory.write(sample)
    sample.metadata |= line.turns[-1].prompt.noted
    sample.reward, sample.rollout_id = copy.deepcopy(reward), shared
    sample.status = SampleStatus.TRUNCATED if line.turns[-1].finish == "length" else SampleStatus.COMPLETED
    sample.metadata["agent"] = {
        **session.summary(),
        "trajectory": number,
        "trajectories": total,
        "turns_trained": len(line.turns),
        "realigned": line.steps.count(Step.REALIGN),
        "drifted": sum(turn.prompt.drifted for turn in line.turns),
        "tool_calls": sum(turn.tool_calls for turn in line.turns),
        "ill_formed": sum(turn.ill_formed for turn in line.turns),
        "truncated": session.truncated,
    }
    return sample
