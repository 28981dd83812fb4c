"""Answer a request of a session, from messages to a recorded turn: the front's `Desk` for agents.

::

    begin      messages -> place in the tree -> prompt ids -> room            (400, 429, 503)
    pieces     engine.stream or engine.generate, text as it becomes known     (client gone: engine.abort)
    finished   node in the tree; it counts once the client has the answer (`ended`)

The node is added before the answer is sent, because the client's next request may arrive before the server knows that
the last byte was sent. `ended` removes the node again if the client had disconnected.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any

from slime_serving.front.answer import Answer, LiveText, Piece, TurnReader, calls_of, finish_of
from slime_serving.front.prompts import check_conversation
from slime_serving.front.sampling import api_name
from slime_serving.front.wanted import Wanted
from slime_serving.http.errors import BadRequest, Refused
from slime_serving.http.threads import DeadlineThreads

from slime_agent_base_url.prompts import PromptWriter
from slime_agent_base_url.sessions import Session, session_key
from slime_agent_base_url.tree import Node, Place, Prompt, Turn
from slime_core.protocols import RolloutEngine
from slime_core.sample import GenerationOutput
from slime_core.tools import ParsedTurn
from slime_core.waits import loop_turn, waiting

logger = logging.getLogger(__name__)

_CONSTRAINTS = ("json_schema", "regex")
_AT_ONCE = 1 << 13
"""Limit of characters: a longer conversation is rendered on a thread, which costs more than a short rendering."""
_OF_MESSAGE = 64
"""Characters that a message counts as beside its text."""


@dataclass(eq=False)
class Turned:
    """A request that is being answered; it implements `Asked`."""

    session: Session
    wanted: Wanted
    place: Place
    prompt: Prompt
    ids: list[int]
    """Token ids of the prompt."""
    rid: str
    params: dict[str, Any]
    room: int
    output: GenerationOutput | None = None
    answer: Answer | None = None
    node: Node | None = None

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens of the prompt."""
        return len(self.ids)


class AgentDesk:
    """Answer requests of all sessions with one engine."""

    def __init__(
        self,
        engine: RolloutEngine,
        writer: PromptWriter,
        reader: TurnReader,
        sessions: Mapping[str, Session],
        model_name: str,
        context: int,
    ) -> None:
        """Create the desk. `context` is the maximum number of tokens of a conversation that is rendered."""
        self.engine, self.writer, self.reader = engine, writer, reader
        self.sessions, self.model_name, self.context = sessions, model_name, context
        self._name, self._numbers = f"agent-{secrets.token_hex(12)}", itertools.count()
        """Beginning of the ids of this desk's requests in the engine, and their numbers."""
        self._threads: DeadlineThreads | None = None
        self._aborts: set[asyncio.Task[None]] = set()

    async def about(self) -> dict[str, Any]:
        """Return an empty mapping."""
        return {}

    def caller(self, headers: Mapping[str, str], body: Mapping[str, Any]) -> Session:
        """Return the session of a request. Raises Refused with 401."""
        key = session_key(headers, body)
        session = self.sessions.get(key or "")
        if session is None:
            what = "there is no API key" if not key else "the API key is no open session's"
            raise Refused(401, f"{what}; the program's environment has it (OPENAI_API_KEY, ANTHROPIC_API_KEY)")
        return session

    async def begin(self, caller: Session, wanted: Wanted) -> list[Turned]:
        """Prepare the engine's request.

        Raises:
            BadRequest: The messages cannot be rendered, tools have no parser, or training does not support an option.
            Refused: The session takes no more requests.
        """
        await loop_turn()
        if wanted.n != 1:
            raise BadRequest(f"n is {wanted.n}; allowed: 1. Ask several times: each answer is a branch of its own")
        if wanted.top_logprobs:
            raise BadRequest("top_logprobs is not offered: logprobs has the sampled tokens' own")
        if any(name in wanted.sampling for name in _CONSTRAINTS):
            raise BadRequest("response_format is not offered, nor any constraint: the policy's own tokens are trained")
        if wanted.template_kwargs:
            raise BadRequest("chat_template_kwargs is not offered: the run's are used (--apply-chat-template-kwargs)")
        if wanted.tools and self.reader.parser is None:
            raise BadRequest("tools are given, and no tool call parser is chosen for the model; --tool-call-parser")
        caller.conversations.resolve(wanted)
        caller.counts["requests"] += 1
        number = caller.counts["requests"]
        for name in wanted.wishes:
            caller.warn(f"{name} has no effect")
        if not wanted.parallel_calls and wanted.tools:
            caller.warn("parallel_tool_calls has no effect")
        place, prompt = await self._prompt(caller, wanted)
        ids, params = prompt.ids, _params(caller, wanted, number)
        room = caller.room(len(ids), _first_prompt(place, len(ids)))
        if wanted.max_tokens is not None:
            room = min(room, wanted.max_tokens)
        params["max_new_tokens"] = max(room, 0)
        caller.admit()
        return [Turned(caller, wanted, place, prompt, ids, f"{self._name}-{next(self._numbers)}", params, room)]

    async def _prompt(self, session: Session, wanted: Wanted) -> tuple[Place, Prompt]:
        size = check_conversation(wanted, self.context) + _OF_MESSAGE * len(wanted.messages)
        place = session.tree.find(wanted.messages, wanted.tools)
        write = partial(self.writer.prompt, wanted.messages, wanted.tools, place)
        if size <= _AT_ONCE:  # the template is the run's, and takes no values of the client beside the messages
            return place, write()
        return place, await self.threads.call("rendering the messages", write)

    async def count(self, caller: Session, wanted: Wanted) -> int:
        """Return the number of prompt tokens of the same request. Raises BadRequest."""
        check_conversation(wanted, self.context)
        place = caller.tree.find(wanted.messages, wanted.tools)
        return await self.threads.call(
            "rendering the messages", lambda: self.writer.count(wanted.messages, wanted.tools, place)
        )

    @property
    def threads(self) -> DeadlineThreads:
        """Threads for work with a deadline, created in the event loop that first uses them."""
        self._threads = self._threads or DeadlineThreads()
        return self._threads

    async def pieces(self, asked: Turned) -> AsyncGenerator[Piece, None]:
        """Generate, and yield the text of a streamed request as it arrives. `asked.answer` is set at the end.

        Raises:
            EngineError: The engine refused the request or stopped answering.
            Refused: 503, the engine ended the request for the framework.
        """
        wanted, opened = asked.wanted, self.reader.opened(asked.ids)
        live = LiveText(self.reader, wanted.tools, opened, wanted.stop)
        skips = bool(asked.params.get("skip_special_tokens", True))
        if asked.room <= 0:
            asked.output = _nothing(asked)
        else:
            async with aclosing(self._outputs(asked)) as outputs:
                async for so_far in outputs:
                    asked.output = so_far
                    if wanted.stream and not so_far.meta_info.get("finish_reason"):
                        yield Piece(*live.grow(self.reader.text(so_far, skips, ())[0]))
        assert asked.output is not None, "the engine ended without an answer"
        output = asked.output
        if finish_of(output) == "abort":
            asked.session.aborted.set()
            raise Refused(503, "the run was interrupted; it will be repeated")
        await loop_turn()
        stop_match, parsed = self._read(wanted, output, skips, opened)
        if wanted.stream:
            yield Piece(*live.finish(parsed.content, parsed.reasoning))
            if live.content != parsed.content or live.reasoning != parsed.reasoning:
                asked.session.warn("streamed text differs from the parsed turn; what was streamed is recorded")
        asked.answer = Answer(
            output,
            live.content if wanted.stream else parsed.content,
            live.reasoning if wanted.stream else parsed.reasoning,
            calls_of(parsed),
            len(parsed.ill_formed),
            len(asked.ids),
            stop_match,
            [] if wanted.top_logprobs is None else self.reader.log_probs(output),
        )

    def _read(
        self, wanted: Wanted, output: GenerationOutput, skips: bool, opened: bool
    ) -> tuple[str | None, ParsedTurn]:
        """Return the whole answer: its text and calls, and the reason why it stopped."""
        text, stop_match = self.reader.text(output, skips, wanted.stop)
        return stop_match, self.reader.parse(text, wanted.tools, opened)

    async def _outputs(self, asked: Turned) -> AsyncGenerator[GenerationOutput, None]:
        """Yield the engine's answers so far, the last one finished; end the engine's request on an early exit."""
        ids, finished = asked.ids, False
        session = asked.session
        what = waiting("an answer for an agent", deadline=None, then="--rollout-timeout ends the sample")
        try:
            with session.in_engine(asked.rid), what:
                if asked.wanted.stream and hasattr(self.engine, "stream"):
                    streamed = self.engine.stream(ids, asked.params, rid=asked.rid, session_id=session.base.session_id)
                    async with aclosing(streamed) as outputs:
                        async for output in outputs:
                            finished = bool(output.meta_info.get("finish_reason"))
                            yield output
                else:
                    output = await self.engine.generate(
                        ids, asked.params, rid=asked.rid, session_id=session.base.session_id
                    )
                    finished = True
                    yield output
        except (asyncio.CancelledError, GeneratorExit):
            if not finished:
                self._abort(asked.rid)
            raise

    def _abort(self, rid: str) -> None:
        """Abort a request whose client has gone; not awaited, because its handler is being cancelled."""
        task = asyncio.ensure_future(self.engine.abort(rid))
        self._aborts.add(task)
        task.add_done_callback(self._aborted)

    def _aborted(self, task: asyncio.Task[None]) -> None:
        self._aborts.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.warning("a request whose client was gone could not be ended: %s", task.exception())

    def works(self, caller: Session, task: asyncio.Task[Any]) -> None:
        """Add the task to the session, so that closing the session ends the task."""
        caller.running.add(task)
        task.add_done_callback(caller.running.discard)

    def finished(self, caller: Session, asked: Turned, response: str) -> None:
        """Add the answer to the tree so that later requests can continue it; it does not count before `ended`."""
        answer, output = asked.answer, asked.output
        assert answer is not None, "finished comes after pieces"
        assert output is not None, "finished comes after pieces"
        if asked.wanted.conversation:
            caller.conversations.remember(response, asked.wanted, answer.message)
        if finish_of(output) == "length":
            caller.truncated = True
        if not output.token_ids:
            return
        turn = Turn(asked.prompt, output, ill_formed=answer.ill_formed, tool_calls=len(answer.calls))
        asked.node = caller.tree.add(asked.place, asked.wanted.messages, answer.message, turn)

    def ended(self, caller: Session, asked: Sequence[Turned], delivered: bool) -> None:
        """Mark the answer as delivered, or remove an undelivered answer unless the client has continued it already."""
        (turned,) = asked
        if not delivered:
            caller.counts["disconnected"] += 1
        if delivered and turned.node is not None:
            turned.node.delivered = True
        elif turned.node is None or not turned.node.children:
            if turned.node is not None:
                caller.tree.forget(turned.node)
            caller.give_back()

    def refused(self, caller: Session, asked: Sequence[Turned], problem: Exception) -> int:
        """Return the HTTP status of a problem (502 for an engine error), note it and give the session its turn back."""
        status = 400 if isinstance(problem, BadRequest) else getattr(problem, "status", None) or 502
        caller.errors.append(f"{status}: {problem}")
        for _ in asked:
            caller.give_back()
        return int(status)


def _params(session: Session, wanted: Wanted, number: int) -> dict[str, Any]:
    """Return the session's sampling parameters, updated with the parameters of the request that have an effect."""
    params = dict(session.sampling_params)
    for name, value in wanted.sampling.items():
        if name not in ("temperature", "top_p"):
            session.warn(f"{api_name(name)} has no effect")
        elif session.limits.client_sampling and session.evaluation:
            params[name] = value
        elif value != params.get(name, 1.0):
            session.warn(f"{name} has no effect: the run's is used")
    if wanted.stop:
        own = params.get("stop") or []
        params["stop"] = [*([own] if isinstance(own, str) else own), *wanted.stop]
    if params.get("sampling_seed") is not None:
        digest = hashlib.blake2b(repr((params["sampling_seed"], number)).encode(), digest_size=4).digest()
        params["sampling_seed"] = int.from_bytes(digest, "little") >> 1  # repeated questions get different answers
    return params


def _first_prompt(place: Place, length: int) -> int:
    """Return the tokens of the first prompt of a conversation; `length` if the request begins the conversation."""
    first = next((node.turn for node in place.nodes if node.turn is not None), None)
    return length if first is None else len(first.prompt.ids)


def _nothing(asked: Turned) -> GenerationOutput:
    """Return the empty answer to a request without room for an answer."""
    meta = {"finish_reason": {"type": "length", "length": 0}, "prompt_tokens": len(asked.ids)}
    return GenerationOutput([], [], "", meta)
