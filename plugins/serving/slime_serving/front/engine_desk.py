"""Answer requests of the front with an engine, independently of each other.

`add_routes` adds the front's routes to the application of an embedded engine (`native.py`). Only those
`chat_template_kwargs` that the template itself reads are passed on: `apply_chat_template` takes its own parameters the
same way, and one of them is the template.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from slime_data.tool_parsers import tool_parser
from slime_embedded.engine.sampler import derive_seed

from slime_core.data.tokenizer import encode_rendered, encode_text
from slime_core.errors import EngineError
from slime_core.protocols import Args
from slime_core.sample import GenerationOutput
from slime_serving.front.answer import Answer, LiveText, Piece, TurnReader, calls_of
from slime_serving.front.app import add_front
from slime_serving.front.prompts import allowed_kwargs, check_conversation, quoted, render
from slime_serving.front.wanted import Conversations, Wanted
from slime_serving.http.bodies import check_text
from slime_serving.http.errors import BadRequest, Refused, shown
from slime_serving.http.threads import DeadlineThreads

if TYPE_CHECKING:
    from slime_embedded.engine.engine import EmbeddedEngine

_AT_ONCE = 1024
"""Limit of tokens and alternatives: a larger answer is not parsed in the event loop."""
_RESPONSES = 1024
"""Number of newest responses that `previous_response_id` may name."""


@dataclass(eq=False)
class Question:
    """An answer in the making; an `Asked`."""

    wanted: Wanted
    ids: list[int]
    params: dict[str, Any]
    rid: str
    first: bool
    """True for the first of the choices for its prompt."""
    answer: Answer | None = None

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens of the prompt."""
        return len(self.ids)


class EngineDesk:
    """A `Desk` that keeps state only for the Responses API."""

    def __init__(self, engine: EmbeddedEngine, args: Args, model_name: str) -> None:
        """`args`: read for `tool_call_parser` and `content_special_tokens`."""
        self.engine, self.args, self.model_name = engine, args, model_name
        self.conversations = Conversations(_RESPONSES)
        self.threads = DeadlineThreads()

    @cached_property
    def reader(self) -> TurnReader:
        """The parser of the model's turns. Raises BadRequest without a tokenizer."""
        tokenizer = self.engine.tokenizer
        if tokenizer is None:
            raise BadRequest("this API answers with text, and the model directory has no tokenizer; use /generate")
        return TurnReader(tokenizer, tool_parser(self.args, tokenizer, "hermes"))

    async def about(self) -> dict[str, Any]:
        """Return the model directory and the context length."""
        info = await self.engine.info()
        return {"root": info["model_path"], "max_model_len": info["max_context_length"]}

    def caller(self, headers: Mapping[str, str], body: Mapping[str, Any]) -> None:
        """Return None: every request that passed the guard is accepted."""

    async def begin(self, caller: None, wanted: Wanted) -> list[Question]:
        """Return a question per prompt and choice. Raises BadRequest."""
        for name, value in wanted.wishes.items():
            raise BadRequest(f"{name} is {shown(value)}, which is not offered; leave it out")
        prompts = await self._prompts(wanted)
        context = (await self.engine.info())["max_context_length"]
        questions = []
        for number in range(len(prompts) * wanted.n):
            ids = prompts[number // wanted.n]
            limit = max(context - len(ids), 1) if wanted.max_tokens is None else wanted.max_tokens
            params = {**wanted.sampling, "stop": wanted.stop, "max_new_tokens": limit}
            if number and params.get("sampling_seed") is not None:
                params["sampling_seed"] = derive_seed(params["sampling_seed"], number)
            rid = f"front-{secrets.token_hex(12)}" if wanted.rid is None else f"{wanted.rid}_{number}"
            if wanted.rid is not None and len(prompts) * wanted.n == 1:
                rid = wanted.rid
            questions.append(Question(wanted, ids, params, rid, number % wanted.n == 0))
        return questions

    async def _prompts(self, wanted: Wanted) -> list[list[int]]:
        tokenizer = self.reader.tokenizer
        context = (await self.engine.info())["max_context_length"]
        if wanted.prompts:
            for prompt in wanted.prompts:
                check_text(len(prompt), context, "prompt")
            prompts = wanted.prompts
            return await self.threads.call(
                "tokenising the prompt",
                lambda: [encode_text(tokenizer, p) if isinstance(p, str) else p for p in prompts],
            )
        self.conversations.resolve(wanted)
        check_conversation(wanted, context)
        kwargs = {"add_generation_prompt": True, **allowed_kwargs(tokenizer, wanted.template_kwargs)}

        def written() -> list[int]:
            messages = quoted(tokenizer, wanted.messages, self.args)
            return encode_rendered(tokenizer, render(tokenizer, messages, wanted.tools, kwargs))

        return [await self.threads.call("rendering the messages", written)]

    async def count(self, caller: None, wanted: Wanted) -> int:
        """Return the number of tokens of the prompt. Raises BadRequest."""
        (ids,) = await self._prompts(wanted)
        return len(ids)

    async def pieces(self, asked: Question) -> AsyncGenerator[Piece, None]:
        """Generate with the engine and yield the pieces. Raises EngineError."""
        wanted, plain = asked.wanted, not (asked.wanted.tools or asked.wanted.separate_reasoning)
        opened = not plain and self.reader.opened(asked.ids)
        live = LiveText(self.reader, wanted.tools, opened, wanted.stop)
        output: GenerationOutput | None = None
        told = 0
        async with aclosing(self._outputs(asked)) as outputs:
            async for output in outputs:
                if wanted.stream and not output.meta_info.get("finish_reason"):
                    reasoning, content = ("", live.raw(output.text)) if plain else live.grow(self._text(asked, output))
                    if reasoning or content:
                        log_probs = [] if wanted.top_logprobs is None else self.reader.log_probs(output, told)
                        told += len(log_probs)
                        yield Piece(reasoning, content, log_probs)
        assert output is not None, "the engine ended without an answer"
        made = partial(self._answer, asked, output, opened, plain, told)
        long = len(output.token_ids) * (1 + (wanted.top_logprobs or 0)) > _AT_ONCE
        asked.answer = await self.threads.call("reading the answer", made) if long else made()
        if wanted.stream:
            last = live.finish(asked.answer.content, asked.answer.reasoning)
            log_probs = asked.answer.log_probs[told:] if last[1] else []
            asked.answer.known_log_probs += len(log_probs)
            yield Piece(*last, log_probs)

    async def _outputs(self, asked: Question) -> AsyncGenerator[GenerationOutput, None]:
        options: dict[str, Any] = {"top_logprobs": asked.wanted.top_logprobs} if asked.wanted.top_logprobs else {}
        if not asked.wanted.stream:
            yield await self.engine.generate(asked.ids, asked.params, rid=asked.rid, **options)
            return
        async with aclosing(self.engine.stream(asked.ids, asked.params, rid=asked.rid, **options)) as outputs:
            async for output in outputs:
                yield output

    def _text(self, asked: Question, output: GenerationOutput) -> str:
        """Return the output's text, with the special tokens that a parser needs."""
        return self.reader.text(output, bool(asked.params.get("skip_special_tokens", True)), asked.wanted.stop)[0]

    def _answer(self, asked: Question, output: GenerationOutput, opened: bool, plain: bool, told: int) -> Answer:
        wanted, reason = asked.wanted, output.meta_info.get("finish_reason") or {}
        content, reasoning, calls, ill_formed = output.text, "", [], 0
        if not plain:
            parsed = self.reader.parse(self._text(asked, output), wanted.tools, opened)
            content, reasoning, ill_formed = parsed.content, parsed.reasoning, len(parsed.ill_formed)
            calls = calls_of(parsed)[: None if wanted.parallel_calls else 1]
        matched = reason.get("matched")
        return Answer(
            output, content, reasoning, calls, ill_formed, len(asked.ids),
            stop_match=matched if isinstance(matched, str) else None,
            log_probs=[] if wanted.top_logprobs is None else self.reader.log_probs(output),
            known_log_probs=told, first_of_prompt=asked.first,
        )  # fmt: skip

    def works(self, caller: None, task: asyncio.Task[Any]) -> None:
        """Do nothing: only the client ends a request."""

    def finished(self, caller: None, asked: Question, response: str) -> None:
        """Remember the conversation, so that a Responses client can continue it."""
        assert asked.answer is not None, "finished comes after pieces"
        if asked.wanted.conversation:
            self.conversations.remember(response, asked.wanted, asked.answer.message)

    def ended(self, caller: None, asked: Sequence[Question], delivered: bool) -> None:
        """Do nothing: nothing is kept of the request."""

    def refused(self, caller: None, asked: Sequence[Question], problem: Exception) -> int:
        """Return 503 if the engine has stopped, else an error of the client."""
        if isinstance(problem, Refused):
            return problem.status
        return 503 if self.engine.failed and isinstance(problem, EngineError) else 400


def add_routes(app: FastAPI, engine: EmbeddedEngine, args: Args) -> None:
    """Add the front to an engine's application."""
    add_front(app, EngineDesk(engine, args, app.state.model_name))
