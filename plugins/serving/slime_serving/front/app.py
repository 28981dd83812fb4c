"""Routes of the front, and delivery of an answer to its client.

    POST body -> Api.wanted -> Desk.begin -> Desk.pieces of each choice -> Api.Stream or Api.reply -> bytes
                  400             400, 401       engine                       |
                                                                              `-> sent: Desk.ended(delivered=True)
                                                                                  client gone, cancelled, failed: False

The task of a request builds and sends the answer, and the desk knows it. So the end of the session, or a client that
disconnects, also ends the engine's work. The answer counts as delivered once its last byte was written to a connection
that was not lost: many clients close it as soon as they have read the last event.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from typing import Any, Protocol

import orjson
from fastapi import FastAPI, Request, Response
from starlette.types import Receive, Scope, Send

from slime_core.errors import EngineError
from slime_serving.front import anthropic_messages, openai_chat, openai_completions, openai_responses
from slime_serving.front.answer import Answer, Piece
from slime_serving.front.wanted import Wanted
from slime_serving.http.bodies import JsonRoute
from slime_serving.http.errors import ClientGone, Refused
from slime_serving.http.streams import json_response, merge

_CLOSED = "this session is closed; its run has ended"
_TURNS_TO_NOTICE = 4
"""Turns of the event loop from a closed connection to the end of the task that waits for it."""


class Events(Protocol):
    """A streamed answer as events of an API."""

    def begin(self, choice: int) -> Iterator[bytes]:
        """Yield the events before any text of a choice."""

    def piece(self, choice: int, piece: Piece) -> Iterator[bytes]:
        """Yield the events of new text."""

    def end(self, choice: int, answer: Answer) -> Iterator[bytes]:
        """Yield the last events of a choice."""

    def close(self, answers: list[Answer]) -> Iterator[bytes]:
        """Yield the last events of the answer."""

    def failed(self, status: int, message: str) -> Iterator[bytes]:
        """Yield the events of an error, in place of the end."""


class Api(Protocol):
    """An API: one of the modules `openai_chat`, `openai_completions`, `openai_responses`, `anthropic_messages`."""

    def Body(self, **values: Any) -> Any:
        """The request's pydantic model, a class."""

    def Stream(self, wanted: Wanted, ident: str, prompt_tokens: int) -> Events:
        """The class that makes the events of a streamed answer."""

    def wanted(self, body: Any) -> Wanted:
        """Return the request in the common form. Raises BadRequest."""

    def reply(self, wanted: Wanted, ident: str, answers: list[Answer]) -> dict[str, Any]:
        """Return the answer's body."""


class Asked(Protocol):
    """An answer that is being generated."""

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens of the prompt."""

    answer: Answer | None
    """Set once `Desk.pieces` has ended."""


class Desk(Protocol):
    """The component that answers requests."""

    model_name: str
    """Model name that `/v1/models` lists; requests may name any model."""

    async def about(self) -> dict[str, Any]:
        """Return further fields of the model for `/v1/models`."""

    def caller(self, headers: Mapping[str, str], body: Mapping[str, Any]) -> Any:
        """Return the caller that the headers and body identify. Raises Refused with 401."""

    async def begin(self, caller: Any, wanted: Wanted) -> Sequence[Any]:
        """Start a request and return an `Asked` per answer. Raises BadRequest, Refused."""

    def pieces(self, asked: Any) -> AsyncGenerator[Piece, None]:
        """Generate with the engine; yield text of a streamed request as it arrives. Raises EngineError, Refused."""

    def works(self, caller: Any, task: asyncio.Task[Any]) -> None:
        """Register the task that answers the caller; if cancelled, the task answers 503."""

    def finished(self, caller: Any, asked: Any, response: str) -> None:
        """Record a complete answer before it is sent, under the id that a Responses client may refer to later."""

    def ended(self, caller: Any, asked: Sequence[Any], delivered: bool) -> None:
        """Record whether the client received the answers or disconnected."""

    def refused(self, caller: Any, asked: Sequence[Any], problem: Exception) -> int:
        """Record that an EngineError or a Refused replaces the answer, and return its HTTP status."""

    async def count(self, caller: Any, wanted: Wanted) -> int:
        """Return the number of prompt tokens of the request. Raises BadRequest."""


class Exchange(Response):
    """A request and the HTTP response to it."""

    def __init__(self, api: Api, desk: Desk, caller: Any, wanted: Wanted, asked: Sequence[Any]) -> None:
        super().__init__()
        self.api, self.desk, self.caller, self.wanted, self.asked = api, desk, caller, wanted, asked
        self.ident = secrets.token_hex(12)
        self._begun = self._complete = self._settled = self._over = self._gone = False
        """In this order: headers are sent, the last bytes are made, the desk knows the end, all is sent, the client has
        left."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it; raises, before anything was sent, what the client is to be told instead."""
        task = asyncio.current_task()
        assert task is not None
        self.desk.works(self.caller, task)
        watch = asyncio.create_task(self._watch(receive, task))
        try:
            await self._send(send)
        except asyncio.CancelledError:
            task.uncancel()
            if self._over:  # all was sent
                return
            if self._gone:
                raise ClientGone from None
            if not self._begun:
                raise Refused(503, _CLOSED) from None
            await self._give_up(send, 503, _CLOSED)
        finally:
            self._over = True
            watch.cancel()

    async def _watch(self, receive: Receive, task: asyncio.Task[Any]) -> None:
        """Cancel the task that sends the answer if the client disconnects."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        if not self._over:
            task.cancel()

    async def _send(self, send: Send) -> None:
        try:
            content = self._events() if self.wanted.stream else self._whole()
            async with aclosing(content):
                async for data in content:
                    for _ in range(_TURNS_TO_NOTICE if self._complete else 0):
                        await asyncio.sleep(0)
                    await self._pass_on(send, data)
                    if self._complete:  # before any turn of the loop, in which the client may close the connection
                        self._over = True
                        self._settle(not self._gone)
                    else:
                        await asyncio.sleep(0)  # pieces that are ready would follow without a turn for other clients
        except (EngineError, Refused) as problem:
            self._settled = True
            status = self.desk.refused(self.caller, self.asked, problem)
            if not self._begun:
                raise Refused(status, str(problem)) from problem
            await self._give_up(send, status, str(problem))
        finally:
            self._settle(False)

    async def _give_up(self, send: Send, status: int, message: str) -> None:
        """End a started stream with the events of an error."""
        failed = self.api.Stream(self.wanted, self.ident, 0).failed(status, message) if self.wanted.stream else ()
        await send({"type": "http.response.body", "body": b"".join(failed)})

    def _settle(self, delivered: bool) -> None:
        if not self._settled:
            self._settled = True
            self.desk.ended(self.caller, self.asked, delivered)

    async def _pass_on(self, send: Send, data: bytes) -> None:
        if not self._begun:
            self._begun = True
            kind = b"text/event-stream" if self.wanted.stream else b"application/json"
            headers = [(b"content-type", kind), (b"cache-control", b"no-cache"), (b"request-id", self.ident.encode())]
            if not self.wanted.stream:
                headers.append((b"content-length", str(len(data)).encode()))
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        if data or self._complete:
            await send({"type": "http.response.body", "body": data, "more_body": not self._complete})

    async def _whole(self) -> AsyncGenerator[bytes, None]:
        async with aclosing(merge([self.desk.pieces(asked) for asked in self.asked])) as pieces:
            async for _ in pieces:
                pass
        answers = [self._finished(asked) for asked in self.asked]

        def written() -> bytes:
            return orjson.dumps(self.api.reply(self.wanted, self.ident, answers))

        long = self.wanted.top_logprobs is not None and len(answers) > 1
        reply = await asyncio.to_thread(written) if long else written()
        self._complete = True
        yield reply

    async def _events(self) -> AsyncGenerator[bytes, None]:
        stream = self.api.Stream(self.wanted, self.ident, self.asked[0].prompt_tokens)
        begun, ended = set[int](), set[int]()
        async with aclosing(merge([_ending(self.desk.pieces(asked)) for asked in self.asked])) as pieces:
            async for choice, piece in pieces:
                data = b"" if choice in begun else b"".join(stream.begin(choice))
                begun.add(choice)
                if piece is _END:
                    data += b"".join(stream.end(choice, self._finished(self.asked[choice])))
                    ended.add(choice)
                else:
                    data += b"".join(stream.piece(choice, piece))
                if len(ended) == len(self.asked):
                    data += b"".join(stream.close([asked.answer for asked in self.asked]))
                    self._complete = True
                yield data

    def _finished(self, asked: Any) -> Answer:
        self.desk.finished(self.caller, asked, f"resp_{self.ident}")
        answer: Answer = asked.answer
        return answer


_END = Piece("", "", [])
"""Marker after the pieces of a choice; compared by identity."""


async def _ending(pieces: AsyncGenerator[Piece, None]) -> AsyncGenerator[Piece, None]:
    async with aclosing(pieces):
        async for piece in pieces:
            yield piece
    yield _END


def add_front(app: FastAPI, desk: Desk, *, completions: bool = True) -> None:
    """Add the routes, and the error shapes of their APIs.

    Args:
        app: Of `slime_serving.http`.
        desk: Who answers.
        completions: Offer `/v1/completions`, whose prompts are no messages.
    """
    app.state.error_shapes |= {"/v1/": openai_chat.error, "/v1/messages": anthropic_messages.error}
    app.router.route_class = JsonRoute

    def add(path: str, api: Any) -> None:
        async def answer(request: Request, body: Any) -> Response:
            caller = desk.caller(request.headers, {"metadata": body.metadata, "user": body.user})
            with _telling(desk, caller):
                wanted = api.wanted(body)
                wanted.model = wanted.model or desk.model_name
                return Exchange(api, desk, caller, wanted, await desk.begin(caller, wanted))

        answer.__annotations__ = {"request": Request, "body": api.Body, "return": Response}
        app.add_api_route(path, answer, methods=["POST"], operation_id=path.strip("/").replace("/", "_"))

    add("/v1/chat/completions", openai_chat)
    add("/v1/responses", openai_responses)
    add("/v1/messages", anthropic_messages)
    if completions:
        add("/v1/completions", openai_completions)

    @app.post("/v1/messages/count_tokens")
    async def count_tokens(request: Request, body: anthropic_messages.CountBody) -> Response:
        caller = desk.caller(request.headers, {"metadata": body.metadata, "user": body.user})
        with _telling(desk, caller):
            return json_response({"input_tokens": await desk.count(caller, anthropic_messages.wanted(body))})

    @app.get("/v1/models")
    async def models() -> Response:
        card = _card(desk.model_name) | await desk.about()
        listed = {"object": "list", "data": [card], "has_more": False}
        return json_response({**listed, "first_id": card["id"], "last_id": card["id"]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        return json_response(_card(name) | await desk.about())


@contextmanager
def _telling(desk: Desk, caller: Any) -> Iterator[None]:
    try:
        yield
    except (EngineError, Refused) as problem:
        raise Refused(desk.refused(caller, (), problem), str(problem)) from problem


def _card(name: str) -> dict[str, Any]:
    """Return a model in a form that both vendors' clients read; requests may name any model."""
    return {
        "id": name, "object": "model", "created": 0, "owned_by": "slime", "type": "model", "display_name": name,
        "created_at": "1970-01-01T00:00:00Z",
    }  # fmt: skip
