"""Bodies of requests as pydantic models that neither ignore a wish nor refuse a field that wishes nothing.

A route declares a `Body`; FastAPI reads it through `JsonRoute` and describes it in `/openapi.json`. Null is the same as
absent. A field that is declared is used. One in `no_effect` changes no answer, whatever its value; one in `only` is
taken at the values listed, which ask for nothing, and refused at others. All else is unknown: a misspelt field must not
be ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import Annotated, Any, ClassVar

import orjson
from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError, model_validator
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from slime_command_serve.http.errors import shown, unknown

_DEEPEST = 64
"""Objects and lists within each other; schemas of tools are the deepest that one meets."""
NOTHING: tuple[Any, ...] = (False, 0, "", [], {})
"""What asks for nothing, for `only`."""


def _strings(value: Any) -> Any:
    """A string, or strings, as a list without empty ones."""
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise ValueError(f"{shown(value)} is neither a string nor a list of strings")
    return [item for item in items if item]


Stops = Annotated[list[str], BeforeValidator(_strings), Field(max_length=64)]
"""Stop strings."""


class Body(BaseModel):
    """A request's body."""

    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=())
    no_effect: ClassVar[frozenset[str]] = frozenset()
    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

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
                kept[key] = value
            else:
                raise ValueError(unknown(key, cls.model_fields))
        return kept


class JsonRoute(APIRoute):
    """Reads bodies with orjson, and no deeper than `_DEEPEST`.

    What takes a body is asked by itself: FastAPI's own way there, of dependencies, forms and files to be closed, takes
    longer than all the rest of a request.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """As FastAPI calls it."""
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

        async def asked(request: Request) -> Response:
            sent = await request.body()
            given = _json(sent) if sent else None
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
        """As the router calls it."""
        if self._asked is None or scope["method"] not in (self.methods or ()):
            return await super().handle(scope, receive, send)
        response = await self._asked(Request(scope, receive, send))
        await response(scope, receive, send)


def _json(body: bytes) -> Any:
    """The body; deeper than `_DEEPEST`, or no JSON, is status 400."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise HTTPException(400, f"the body is not JSON: {error}") from error
    level: list[Any] = [[value]]
    for _ in range(_DEEPEST + 1):
        inside = [item.values() if isinstance(item, dict) else item for item in level]
        level = [child for children in inside for child in children if isinstance(child, dict | list)]
        if not level:
            return value
    raise HTTPException(400, f"the body has lists or objects more than {_DEEPEST} deep")
