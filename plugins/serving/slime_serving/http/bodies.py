"""Request bodies as pydantic models that ignore no requested feature and refuse no field that requests nothing.

A route declares a `Body`; FastAPI reads it through `JsonRoute` and describes it in `/openapi.json`. Null is the same as
absent. Values are counted in the bytes of a body before it is parsed, and entries of a field before they are validated.

    declared field          used
    field in `no_effect`    accepted with any value; it does not change the answer
    field in `only`         accepted with the listed values, which request nothing; refused with others
    other field             refused as unknown, so that a misspelt field is not ignored
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from functools import lru_cache
from typing import Annotated, Any, ClassVar, get_args

import numpy as np
import orjson
from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError, model_validator
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from slime_serving.http.errors import BadRequest, shown, unknown

_DEEPEST = 64
"""Maximum nesting of objects and lists; schemas of tools are the deepest in practice."""
_MOST_CONTAINERS = 1 << 13
"""Maximum number of objects and lists in a body: messages, their parts, schemas of tools, prompts of a batch."""
_MOST_ENTRIES = 1 << 14
"""Maximum number of entries of a field."""
MOST_IDS = 1 << 19
"""Maximum number of token ids of a request."""
NOTHING: tuple[Any, ...] = (False, 0, "", [], {})
"""Values that request nothing, for `only`."""


def _strings(value: Any) -> Any:
    """Return a string, or strings, as a list without empty strings."""
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise ValueError(f"{shown(value)} is neither a string nor a list of strings")
    return [item for item in items if item]


Stops = Annotated[list[str], BeforeValidator(_strings), Field(max_length=64)]
"""Stop strings."""


class Body(BaseModel):
    """The body of a request."""

    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=())
    no_effect: ClassVar[frozenset[str]] = frozenset()
    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    most_values: ClassVar[int] = 1 << 17
    """Maximum number of values in the whole body."""
    most_entries: ClassVar[Mapping[str, int]] = {}
    """Limits of the fields whose limit differs from `_MOST_ENTRIES`."""

    @model_validator(mode="before")
    @classmethod
    def _fields(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            raise ValueError(f"the body must be a JSON object, not {type(given).__name__}")
        kept = {}
        for key, value in given.items():
            if value is None or key in cls.no_effect:
                continue
            if key in cls.only:
                if not any(type(value) is type(other) and value == other for other in cls.only[key]):
                    allowed = " or ".join(repr(other) for other in cls.only[key])
                    raise ValueError(f"{key} is {shown(value)}, which is not offered; allowed: {allowed}")
            elif key in cls.model_fields:
                most = cls.most_entries.get(key, _MOST_ENTRIES)
                if isinstance(value, list | dict) and len(value) > most:
                    raise ValueError(f"{key} has {len(value)} entries; allowed: {most}")
                kept[key] = value
            else:
                raise ValueError(unknown(key, cls.model_fields))
        return kept


class JsonRoute(APIRoute):
    """A route that reads bodies with orjson, at most `_DEEPEST` levels deep.

    An endpoint with a body is called directly: FastAPI's own way, with dependencies, forms and files to close, takes
    longer than the rest of a request.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler of a request; called by FastAPI."""
        self._asked: Callable[[Request], Coroutine[Any, Any, Response]] | None = None
        if not self.dependant.body_params:
            return super().get_route_handler()
        if (
            self.dependant.dependencies
            or self.response_field
            or self.status_code
            or len(self.dependant.body_params) > 1
        ):
            raise TypeError(f"{self.path}: what takes a body has one, no dependencies, and makes its response itself")
        (body,), of_request = self.dependant.body_params, self.dependant.request_param_name
        kind: Any = body.field_info.annotation
        adapter = TypeAdapter(kind)
        most = max(model.most_values for model in _models(kind))

        async def asked(request: Request) -> Response:
            sent = await request.body()
            given = await _json(sent, most) if sent else None
            try:
                values = {body.name: adapter.validate_python(given)}
            except ValidationError as error:
                raise RequestValidationError(error.errors(include_url=False), body=given) from None
            if of_request is not None:
                values[of_request] = request
            response: Response = await self.endpoint(**values)
            return response

        self._asked = asked
        return asked

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request; called by the router."""
        if self._asked is None or scope["method"] not in (self.methods or ()):
            return await super().handle(scope, receive, send)
        response = await self._asked(Request(scope, receive, send))
        await response(scope, receive, send)


def _models(kind: Any) -> list[type[Body]]:
    """Return the models of an annotation, which is a `Body` or a union of bodies and None."""
    return [model for model in (kind, *get_args(kind)) if isinstance(model, type) and issubclass(model, Body)]


async def _json(body: bytes, most_values: int) -> Any:
    """Parse the body. Raises status 400 for too many values, more than `_DEEPEST` levels, or invalid JSON."""
    containers = others = 0
    if len(body) > _MOST_CONTAINERS:
        async with _counting():
            containers, others = await asyncio.to_thread(_counted, body, most_values)
    if containers > _MOST_CONTAINERS:
        raise HTTPException(400, f"the body has {containers} lists and objects; allowed: {_MOST_CONTAINERS}")
    if containers + others > most_values:
        raise HTTPException(400, f"the body has {containers + others} values; allowed: {most_values}")
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise HTTPException(400, f"the body is not JSON: {error}") from error
    level: list[Any] = [[value]]
    for _ in range(_DEEPEST + 1):
        inside = [item.values() if isinstance(item, dict) else item for item in level]
        holding = [children for children in inside if not {dict, list}.isdisjoint(map(type, children))]
        level = [child for children in holding for child in children if isinstance(child, dict | list)]
        if not level:
            return value
    raise HTTPException(400, f"the body has lists or objects more than {_DEEPEST} deep")


_MARKS = ((b"{", b"["), (b",",))
"""Bytes that begin a list or an object; bytes between two values."""


@lru_cache(maxsize=1)
def _lock_of(loop: asyncio.AbstractEventLoop) -> asyncio.Lock:
    return asyncio.Lock()


def _counting() -> asyncio.Lock:
    """Return the lock under which large bodies are counted, one after the other."""
    return _lock_of(asyncio.get_running_loop())


def _counted(body: bytes, most_values: int) -> tuple[int, int]:
    """Count `_MARKS` in the bytes; if there are too many, count only the marks outside of strings."""
    containers, others = (sum(map(body.count, marks)) for marks in _MARKS)
    if containers <= _MOST_CONTAINERS and containers + others <= most_values:
        return containers, others
    plain = body.replace(rb"\\", b"").replace(rb"\"", b"")
    read = np.frombuffer(plain, dtype=np.uint8)
    outside = np.bitwise_xor.accumulate(read == ord('"')) ^ True
    containers, others = (
        sum(int(np.count_nonzero((read == ord(mark)) & outside)) for mark in marks) for marks in _MARKS
    )
    return containers, others


MOST_ANSWERS = 1024
"""Answers of one request: prompts times `n`."""
MOST_AT_ONCE = 64
"""Answers of one request that the engine makes at a time: others' requests come between those that wait."""
CHARACTERS_PER_TOKEN = 8
"""Characters that a prompt may have per token of the context: text has about four per token, code and white space up to
eight; what has more would not fit once it is tokenised."""
_LEAST = 1 << 14
"""Characters that are taken in any case: tokenising them costs nothing, and the message about ids is the better one."""


def check_text(characters: int, context: int, what: str) -> None:
    """Raise BadRequest for text that cannot fit into the context.

    Args:
        characters: Of the prompt.
        context: Tokens.
        what: What has so many, for the message.
    """
    allowed = max(CHARACTERS_PER_TOKEN * context, _LEAST)
    if characters > allowed:
        raise BadRequest(f"{what} has {characters} characters; allowed: {allowed}, for a context of {context} tokens")
