"""Small pieces shared by the HTTP routes: JSON in and out, server-sent events, client disconnects.

Every route reads its body with `read_json` and answers with `json_response`; a mistake of the client is a `BadRequest`
(or an `EngineError`) and becomes status 400, never 500.
"""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import AsyncIterator, Awaitable, Collection, Mapping
from contextlib import suppress
from typing import Any, TypeVar

import orjson
from fastapi import Request, Response
from fastapi.responses import StreamingResponse

from slime_core.errors import EngineError

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


class BadRequest(EngineError):
    """The request cannot be served as it is."""


async def read_json(request: Request, allowed: Collection[str] | None = None) -> dict[str, Any]:
    """The body as an object whose keys are all in `allowed`; an empty body is an empty object. Raises BadRequest."""
    raw = await request.body()
    try:
        body = orjson.loads(raw) if raw.strip() else {}
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequest(f"the body must be a JSON object, not {type(body).__name__}")
    if allowed is not None:
        check_keys(body, allowed)
    return body


def check_keys(body: Mapping[str, Any], allowed: Collection[str]) -> None:
    """Raise BadRequest for a key that is not in `allowed` (keys set to null are let through)."""
    for key, value in body.items():
        if key not in allowed and value is not None:
            near = difflib.get_close_matches(key, allowed, n=3)
            hint = f"Did you mean {' or '.join(map(repr, near))}?" if near else f"Known: {', '.join(sorted(allowed))}."
            raise BadRequest(f"unknown field {key!r}. {hint}")


def take(body: Mapping[str, Any], key: str, kind: type[T], default: T) -> T:
    """`body[key]` of the given type; null and absent are `default`. Raises BadRequest."""
    value = body.get(key)
    if value is None:
        return default
    if kind is float and type(value) is int:
        return float(value)  # type: ignore[return-value]
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise BadRequest(f"{key} is {value!r}; allowed: {kind.__name__}")
    return value


def json_response(value: Any, status: int = 200) -> Response:
    """`value` as JSON; numbers JSON cannot hold become null."""
    return Response(orjson.dumps(value), status_code=status, media_type="application/json")


def event(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + orjson.dumps(value) + b"\n\n"


async def event_stream(
    request: Request, events: AsyncIterator[bytes], error_shape: str = "sglang"
) -> StreamingResponse:
    """Events as a response. What is wrong with the request itself is raised here, before the status is sent."""
    first = await unless_disconnected(request, anext(events, b""))

    async def body() -> AsyncIterator[bytes]:
        yield first
        try:
            async for item in events:
                yield item
        except EngineError as error:
            yield event(error_body(str(error), error_shape))
        yield DONE

    return StreamingResponse(body(), media_type="text/event-stream")


def error_body(message: str, shape: str = "sglang", code: int = 400) -> dict[str, Any]:
    """SGLang's and OpenAI's error object (both know `error.message`)."""
    kind = "invalid_request_error" if shape == "openai" else "BadRequest"
    return {"error": {"message": message, "type": kind, "code": code}}


async def unless_disconnected(request: Request, work: Awaitable[T]) -> T:
    """Await `work`, cancelling it when the client goes away. Raises ClientGone."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        task.cancel()
        watch.cancel()
        with suppress(asyncio.CancelledError):
            await watch
