"""The endpoints by which an unmodified agent program talks to the policy, and the samples that its talk becomes.

A harness starts one in the rollout's event loop and opens a session per sample::

    program --HTTP--> AgentServer --ids--> engine             one event loop: the engine's methods belong to it, and
       ^    <-- JSON or events <-- Answer <-- tokens           handlers only wait and translate, so no thread of its own
       |                |
       key = session    `-- MessageTree --finish_session--> samples

`/v1/chat/completions`, `/v1/responses`, `/v1/messages`, `/v1/messages/count_tokens`, `/v1/models`, `/healthz`. What a
reader would get wrong: the API key is all that tells whose request it is. There is no default session; a key that
nobody opened is 401, whatever address it comes from.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import aclosing
from typing import Any, Protocol

import orjson
from aiohttp import web

from slime_agent_base_url import anthropic_messages, openai_chat, openai_responses
from slime_agent_base_url.answer import Answer, TurnReader
from slime_agent_base_url.answering import Answering, Asked
from slime_agent_base_url.linearise import Line, Step, linearise
from slime_agent_base_url.messages import BadRequest, Wanted
from slime_agent_base_url.prompts import PromptWriter
from slime_agent_base_url.sessions import Refused, Session, SessionLimits, session_key
from slime_core.errors import EngineError
from slime_core.protocols import Args, RolloutEngine
from slime_core.tools import ToolParser
from slime_core.types import Sample, SampleStatus
from slime_core.waits import loop_turn, waiting

logger = logging.getLogger(__name__)

_LARGEST_BODY = 64 << 20
_CLOSING_S = 5.0
"""Seconds that requests get to end once they were cancelled."""
_HEADERS = {"x-should-retry": "false"}
"""Both clients retry 408, 409, 429 and 5xx unless told; a closed session stays closed."""


class Events(Protocol):
    """One streamed answer in the events of an API."""

    def begin(self) -> Iterator[bytes]:
        """Events before any text."""

    def piece(self, reasoning: str, content: str) -> Iterator[bytes]:
        """New text of each kind, or ""."""

    def end(self, answer: Answer) -> Iterator[bytes]:
        """What comes last."""

    def failed(self, status: int, message: str) -> Iterator[bytes]:
        """Instead of the end."""


class Api(Protocol):
    """One API: the modules `openai_chat`, `openai_responses`, `anthropic_messages`."""

    def Stream(self, wanted: Wanted, ident: str, prompt_tokens: int) -> Events:
        """What makes the events of one streamed answer, a class."""

    def wanted(self, body: Mapping[str, Any]) -> Wanted:
        """The request. Raises BadRequest."""

    def reply(self, wanted: Wanted, ident: str, answer: Answer) -> dict[str, Any]:
        """The answer's body."""

    def error(self, status: int, message: str) -> dict[str, Any]:
        """An error's body."""


class AgentServer:
    """Endpoints, sessions, and samples."""

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
            engine: Started; its methods are called in the loop that `start` is called in.
            tokenizer: With a chat template.
            args: The run's settings; read for `apply_chat_template_kwargs`.
            parser: Reads the model's tool calls; without one, requests with tools are refused.
            model_name: What `/v1/models` lists; requests may name any model.
            check_drift: Count prompts that the template would have written otherwise.
        """
        self.args = args
        self.writer = PromptWriter(tokenizer, args.apply_chat_template_kwargs if args else None, check=check_drift)
        self.answering = Answering(engine, self.writer, TurnReader(tokenizer, parser))
        self.model_name = model_name
        self.sessions: dict[str, Session] = {}
        self._runner: web.AppRunner | None = None
        self.host, self.port = "127.0.0.1", 0

    # -- life ----------------------------------------------------------------------------------------

    def application(self) -> web.Application:
        """The endpoints, for whoever listens by himself; in the loop of the engine, with `handler_cancellation`."""
        app = web.Application(client_max_size=_LARGEST_BODY)
        post, get = app.router.add_post, app.router.add_get
        post("/v1/chat/completions", self._endpoint(openai_chat))
        post("/v1/responses", self._endpoint(openai_responses))
        post("/v1/messages", self._endpoint(anthropic_messages))
        post("/v1/messages/count_tokens", self._count_tokens)
        get("/v1/models", self._models)
        get("/v1/models/{name:.+}", self._models)
        get("/healthz", self._healthz)
        return app

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """Listen; port 0 takes a free one. Raises OSError when the address cannot be had."""
        await asyncio.to_thread(self.writer.warm_up)
        self._runner = web.AppRunner(
            self.application(), handler_cancellation=True, access_log=None, shutdown_timeout=_CLOSING_S
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port)
        try:
            await site.start()
        except OSError:
            await self.stop()
            raise
        self.host, self.port = host, int(self._runner.addresses[0][1])

    async def stop(self) -> None:
        """Close every session and stop listening; safe to call twice."""
        for key in list(self.sessions):
            await self.drop_session(key)
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    @property
    def url(self) -> str:
        """For ANTHROPIC_BASE_URL; OPENAI_BASE_URL has `/v1` after it."""
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
        """A session; its `key` is the API key. Raises ValueError for a key that is in use."""
        key = key or f"sk-slime-{secrets.token_urlsafe(24)}"
        if key in self.sessions:
            raise ValueError(f"session {key!r} is open already")
        session = Session(key, base, dict(sampling_params), limits or SessionLimits(), evaluation)
        self.sessions[key] = session
        return session

    async def close_session(self, key: str) -> None:
        """No more requests: 503 from here on, and what is being answered is cancelled."""
        session = self.sessions[key]
        session.closed = True
        running = {task for task in session.running if task is not asyncio.current_task()}
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
        """Close it; its trajectories as samples that share a `rollout_id`, with the run's reward each.

        Nothing was sampled: one FAILED sample without response. The engine interrupted it: one ABORTED sample, as it
        was given.
        """
        await self.close_session(key)
        session = self.sessions.pop(key)
        await loop_turn()
        return session_samples(session, reward, self.args)

    # -- endpoints -----------------------------------------------------------------------------------

    def _endpoint(self, api: Api) -> Callable[[web.Request], Any]:
        async def handle(request: web.Request) -> web.StreamResponse:
            session: Session | None = None
            task = asyncio.current_task()
            assert task is not None
            try:
                body = await _body(request)
                session = self._session(request, body)
                session.running.add(task)
                await loop_turn()
                asked = self._asked(api, session, body)
                session.admit()
                return await (self._stream if asked.wanted.stream else self._whole)(api, request, asked)
            except BadRequest as problem:
                return _refuse(api, session, 400, str(problem))
            except Refused as refusal:
                return _refuse(api, session, refusal.status, str(refusal))
            finally:
                if session is not None:
                    session.running.discard(task)

        return handle

    def _asked(self, api: Api, session: Session, body: Mapping[str, Any]) -> Asked:
        wanted = api.wanted(body)
        session.resolve(wanted)
        return self.answering.begin(session, wanted)

    async def _whole(self, api: Api, request: web.Request, asked: Asked) -> web.StreamResponse:
        ident = secrets.token_hex(12)
        try:
            async with aclosing(self.answering.pieces(asked)) as pieces:
                async for _ in pieces:
                    pass
        except (EngineError, Refused) as problem:
            asked.session.give_back()
            return _refuse(api, asked.session, getattr(problem, "status", None) or 502, str(problem))
        except asyncio.CancelledError:
            self._gone(asked)
            raise
        assert asked.answer is not None
        self._deliver(api, asked, ident)
        content = orjson.dumps(api.reply(asked.wanted, ident, asked.answer))
        response = web.Response(body=content, content_type="application/json", headers={"request-id": ident})
        return await self._sent(request, asked, response)

    async def _sent(
        self, request: web.Request, asked: Asked, response: web.StreamResponse, content: bytes = b""
    ) -> web.StreamResponse:
        """Send what there is no more of: a whole response, or the `content` that ends a stream."""
        try:
            with waiting("an agent to read its answer", deadline=None, then="it closes the connection"):
                await response.prepare(request)
                await response.write_eof(content)
        except (ConnectionError, asyncio.CancelledError) as gone:
            self._gone(asked)
            if isinstance(gone, asyncio.CancelledError):
                raise
            return response
        self.answering.delivered(asked)
        return response

    async def _stream(self, api: Api, request: web.Request, asked: Asked) -> web.StreamResponse:
        ident = secrets.token_hex(12)
        stream = api.Stream(asked.wanted, ident, len(asked.ids))
        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "request-id": ident}
        response = web.StreamResponse(headers=headers)
        try:
            await response.prepare(request)
            await response.write(b"".join(stream.begin()))
            async with aclosing(self.answering.pieces(asked)) as pieces:
                async for piece in pieces:
                    data = b"".join(stream.piece(*piece))
                    if data:
                        await response.write(data)
        except (EngineError, Refused) as problem:
            asked.session.give_back()
            asked.session.errors.append(str(problem))
            await response.write(b"".join(stream.failed(getattr(problem, "status", None) or 502, str(problem))))
            await response.write_eof()
            return response
        except (ConnectionError, asyncio.CancelledError) as gone:
            self._gone(asked)
            if isinstance(gone, asyncio.CancelledError):
                raise
            return response
        assert asked.answer is not None
        self._deliver(api, asked, ident)
        return await self._sent(request, asked, response, b"".join(stream.end(asked.answer)))

    def _deliver(self, api: Api, asked: Asked, ident: str) -> None:
        assert asked.answer is not None
        self.answering.deliver(asked)
        if api is openai_responses:  # the others' requests bring their conversations along
            conversation = [*asked.wanted.conversation, asked.answer.message]
            asked.session.responses[openai_responses.response_id(ident)] = conversation

    def _gone(self, asked: Asked) -> None:
        """The client has gone (499): what was sampled for this request does not count."""
        asked.session.counts["disconnected"] += 1
        self.answering.withdraw(asked)

    async def _count_tokens(self, request: web.Request) -> web.StreamResponse:
        session = None
        try:
            body = await _body(request)
            session = self._session(request, body)
            wanted = anthropic_messages.counted(body)
            place = session.tree.find(wanted.messages, wanted.tools)
            count = self.writer.count(wanted.messages, wanted.tools, place)
        except BadRequest as problem:
            return _refuse(anthropic_messages, session, 400, str(problem))
        except Refused as refusal:
            return _refuse(anthropic_messages, session, refusal.status, str(refusal))
        return _json({"input_tokens": count})

    async def _models(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info.get("name")
        card = {"id": name or self.model_name, "object": "model", "created": 0, "owned_by": "slime", "type": "model",
                "display_name": name or self.model_name, "created_at": "1970-01-01T00:00:00Z"}  # fmt: skip
        if name:
            return _json(card)
        listed = {"object": "list", "data": [card], "has_more": False}
        return _json({**listed, "first_id": card["id"], "last_id": card["id"]})

    async def _healthz(self, request: web.Request) -> web.StreamResponse:
        return _json({"status": "ok", "sessions": len(self.sessions)})

    def _session(self, request: web.Request, body: Mapping[str, Any]) -> Session:
        key = session_key(request.headers, body)
        session = self.sessions.get(key or "")
        if session is None:
            what = "there is no API key" if not key else "the API key is no open session's"
            raise Refused(401, f"{what}; the program's environment has it (OPENAI_API_KEY, ANTHROPIC_API_KEY)")
        return session


def session_samples(session: Session, reward: float | dict[str, Any] | None, args: Args | None) -> list[Sample]:
    """A closed session's samples; see `AgentServer.finish_session`."""
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


async def _body(request: web.Request) -> dict[str, Any]:
    with waiting("the body of an agent's request", deadline=None, then="it closes the connection"):
        raw = await request.read()
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequest(f"the body must be a JSON object, not {type(body).__name__}")
    return body


def _json(value: Any, status: int = 200) -> web.Response:
    headers = _HEADERS if status != 200 else None
    return web.Response(body=orjson.dumps(value), status=status, content_type="application/json", headers=headers)


def _refuse(api: Api, session: Session | None, status: int, message: str) -> web.Response:
    if session is not None:
        session.errors.append(f"{status}: {message}")
    return _json(api.error(status, message), status)
