"""Exceptions for client errors, and the error bodies of each path's API.

A route raises `BadRequest` or any `EngineError`, and `application` responds in the shape registered for the path:
SGLang's, unless a front has registered its own for `/v1/...`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from fastapi import FastAPI
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from slime_core.errors import EngineError, did_you_mean

Shape = Callable[[int, str], dict[str, Any]]
"""(status, message) -> an error's body."""
_SHOWN = 80
"""Largest number of characters of a client's value in an error message."""


class BadRequest(EngineError):
    """The request is invalid."""


class Refused(Exception):
    """The request is refused with an HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        """HTTP status."""


class ClientGone(Exception):
    """The client closed the connection before the response was complete."""


def sglang_shape(status: int, message: str) -> dict[str, Any]:
    """Return SGLang's error object."""
    return {"error": {"message": message, "type": "BadRequest" if status < 500 else "InternalError", "code": status}}


def shape_of(app: FastAPI, path: str) -> Shape:
    """Return the error shape registered for the longest prefix of `path`."""
    shapes: dict[str, Shape] = app.state.error_shapes
    return shapes[max((prefix for prefix in shapes if path.startswith(prefix)), key=len)]


def shown(value: Any) -> str:
    """Return the beginning of a client's value."""
    text = repr(value[: 4 * _SHOWN]) if isinstance(value, str | bytes | list) else repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def unknown(key: str, known: Iterable[str], what: str = "field") -> str:
    """Return the message for an unknown name, with suggestions."""
    names = sorted(known)
    hint = did_you_mean(key[:_SHOWN], names, form="{!r}", most=3) or f" Known: {', '.join(names)}."
    return f"unknown {what} {shown(key)}.{hint}"


def explain(error: ValidationError | Iterable[ErrorDetails | dict[str, Any]]) -> str:
    """Explain an invalid body in one line: the first wrong field, and its allowed values."""
    details: list[Any] = list(error.errors(include_url=False) if isinstance(error, ValidationError) else error)
    first = details[0]
    place = _place(first)
    if first["type"] == "value_error":
        message = str(first["ctx"]["error"])
        return message if not place or message.startswith(place[-1]) else f"{'.'.join(place)}: {message}"
    if first["type"] == "missing":
        return f"{'.'.join(place) or 'the body'} is missing"
    if first["type"] in ("json_invalid", "model_attributes_type", "dict_type") and not place:
        return "the body must be a JSON object"
    where = [one for one in details if _place(one)[: len(place)] == place]
    allowed = dict.fromkeys(one["msg"].removeprefix("Input should be ") for one in where)
    return f"{'.'.join(place)} is {shown(first['input'])}; allowed: {' or '.join(allowed)}"


def _place(detail: Any) -> list[str]:
    """Return the field names and numbers of an error's location, without "body" and the names of alternatives."""
    parts = [part for part in detail["loc"] if part != "body"]
    return [str(part)[:_SHOWN] for part in parts if isinstance(part, int) or str(part).isidentifier()]
