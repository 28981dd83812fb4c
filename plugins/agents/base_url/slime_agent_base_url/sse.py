"""Values -> server-sent events."""

from __future__ import annotations

from typing import Any

import orjson


def event(value: Any, name: str | None = None) -> bytes:
    """One event; with a name, as Anthropic's and OpenAI's Responses API send them."""
    head = b"event: " + name.encode() + b"\n" if name else b""
    return head + b"data: " + orjson.dumps(value) + b"\n\n"
