"""One request of a session, from messages to a recorded turn.

`server` calls `Answering.begin`, shows the client what `pieces` yields, and `deliver`s::

    begin      messages -> place in the tree -> prompt ids -> room          (400)
    pieces     engine.stream or engine.generate, text as it becomes known   (client gone: engine.abort)
    deliver    node in the tree; it counts once the client has the answer

What a reader would get wrong: the node is there before the answer is sent, since the client's next request may
come before the server knows that the last byte has left; `withdraw` takes it out again when the client was gone.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from slime_agent_base_url.answer import Answer, LiveText, TurnReader, calls_of
from slime_agent_base_url.messages import BadRequest, Wanted
from slime_agent_base_url.prompts import PromptWriter
from slime_agent_base_url.sessions import Refused, Session
from slime_agent_base_url.tree import Node, Place, Prompt, Turn, finish_of
from slime_core.protocols import RolloutEngine
from slime_core.tools import ParsedTurn
from slime_core.types import GenerationOutput
from slime_core.waits import loop_turn, waiting

logger = logging.getLogger(__name__)

Piece = tuple[str, str]
"""New text of (reasoning, content)."""


@dataclass(eq=False)
class Asked:
    """A request that is being answered."""

    session: Session
    wanted: Wanted
    place: Place
    prompt: Prompt
    ids: list[int]
    """Of the prompt."""
    rid: str
    params: dict[str, Any]
    room: int
    output: GenerationOutput | None = None
    answer: Answer | None = None
    node: Node | None = None


class Answering:
    """Answers requests of all sessions with one engine."""

    def __init__(self, engine: RolloutEngine, writer: PromptWriter, reader: TurnReader) -> None:
        self.engine = engine
        self.writer = writer
        self.reader = reader
        self._aborts: set[asyncio.Task[None]] = set()

    def begin(self, session: Session, wanted: Wanted) -> Asked:
        """Make the engine's request; the session has yet to `admit` it.

        Raises:
            BadRequest: Messages that cannot be rendered, or tools without a parser.
        """
        if wanted.tools and self.reader.parser is None:
            raise BadRequest("tools are given, and no tool call parser is chosen for the model; --tool-call-parser")
        session.counts["requests"] += 1
        number = session.counts["requests"]
        for name in wanted.ignored:
            session.warn(f"{name} has no effect")
        place = session.tree.find(wanted.messages, wanted.tools)
        prompt = self.writer.prompt(wanted.messages, wanted.tools, place)
        ids, params = prompt.ids, _params(session, wanted, number)
        room = session.room(len(ids), _first_prompt(place, len(ids)))
        if wanted.max_tokens is not None:
            room = min(room, wanted.max_tokens)
        params["max_new_tokens"] = max(room, 0)
        return Asked(session, wanted, place, prompt, ids, f"agent-{secrets.token_hex(12)}", params, room)

    async def pieces(self, asked: Asked) -> AsyncGenerator[Piece, None]:
        """Ask the engine; yields text of a streamed request as it is known. `asked.answer` is set at the end.

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
                        yield live.grow(self.reader.text(so_far, skips, ())[0])
        assert asked.output is not None, "the engine ended without an answer"
        output = asked.output
        if finish_of(output) == "abort":
            asked.session.aborted.set()
            raise Refused(503, "the run was interrupted; it will be repeated")
        await loop_turn()
        stop_match, parsed = self._read(wanted, output, skips, opened)
        if wanted.stream:
            yield live.finish(parsed.content, parsed.reasoning)
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
            self.reader.log_probs(output) if wanted.logprobs else [],
        )

    def _read(
        self, wanted: Wanted, output: GenerationOutput, skips: bool, opened: bool
    ) -> tuple[str | None, ParsedTurn]:
        """The whole answer: what stopped it, and what it says."""
        text, stop_match = self.reader.text(output, skips, wanted.stop)
        return stop_match, self.reader.parse(text, wanted.tools, opened)

    async def _outputs(self, asked: Asked) -> AsyncGenerator[GenerationOutput, None]:
        """The engine's answers so far, the last one finished; ends the engine's request when it is left."""
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
        """End a request that nobody waits for; not awaited, as its handler is being cancelled."""
        task = asyncio.ensure_future(self.engine.abort(rid))
        self._aborts.add(task)
        task.add_done_callback(self._aborted)

    def _aborted(self, task: asyncio.Task[None]) -> None:
        self._aborts.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.warning("a request whose client was gone could not be ended: %s", task.exception())

    def deliver(self, asked: Asked) -> None:
        """Put the answer into the tree, to be followed up; it does not count before `delivered`."""
        answer, output = asked.answer, asked.output
        assert answer is not None, "deliver comes after pieces"
        assert output is not None, "deliver comes after pieces"
        if finish_of(output) == "length":
            asked.session.truncated = True
        if not output.token_ids:
            return
        turn = Turn(asked.prompt, output, ill_formed=answer.ill_formed, tool_calls=len(answer.calls))
        asked.node = asked.session.tree.add(asked.place, asked.wanted.messages, answer.message, turn)

    def delivered(self, asked: Asked) -> None:
        """The client has the answer."""
        if asked.node is not None:
            asked.node.delivered = True
        else:
            asked.session.give_back()

    def withdraw(self, asked: Asked) -> None:
        """The client does not have the answer; unless it went on from it meanwhile, it was never given."""
        if asked.node is not None and asked.node.children:
            return
        if asked.node is not None:
            asked.session.tree.forget(asked.node)
        asked.session.give_back()


def _params(session: Session, wanted: Wanted, number: int) -> dict[str, Any]:
    """The session's sampling parameters, with what of the request has an effect."""
    params = dict(session.sampling_params)
    for name in ("temperature", "top_p"):
        value = getattr(wanted, name)
        if value is None:
            continue
        if session.limits.client_sampling and session.evaluation:
            params[name] = value
        elif value != params.get(name, 1.0):
            session.warn(f"{name} has no effect: the run's is used")
    if wanted.stop:
        own = params.get("stop") or []
        params["stop"] = [*([own] if isinstance(own, str) else own), *wanted.stop]
    if params.get("sampling_seed") is not None:
        digest = hashlib.blake2b(repr((params["sampling_seed"], number)).encode(), digest_size=4).digest()
        params["sampling_seed"] = int.from_bytes(digest, "little") >> 1  # the same question twice: other answers
    return params


def _first_prompt(place: Place, length: int) -> int:
    """Tokens of the first prompt of the conversation that a request of `length` tokens goes on with."""
    first = next((node.turn for node in place.nodes if node.turn is not None), None)
    return length if first is None else len(first.prompt.ids)


def _nothing(asked: Asked) -> GenerationOutput:
    """The answer when there is no room for one."""
    meta = {"finish_reason": {"type": "length", "length": 0}, "prompt_tokens": len(asked.ids)}
    return GenerationOutput([], [], "", meta)
