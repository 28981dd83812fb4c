"""Messages between the caller and the sandbox's first process: a JSON object and bytes, over a stream socket.

Both sides use it. Layout: two big-endian 32-bit lengths, the JSON, the bytes. What comes out of a sandbox is not
trusted, so a length above the reader's limit ends the conversation.
"""

from __future__ import annotations

import json
import struct
from typing import Any

HEADER = struct.Struct(">II")
MOST = 1 << 30


def pack(message: dict[str, Any], body: bytes = b"") -> bytes:
    """One message on the wire."""
    head = json.dumps(message).encode()
    return HEADER.pack(len(head), len(body)) + head + body


def take(buffer: bytearray, most: int = MOST) -> tuple[dict[str, Any], bytes] | None:
    """The first whole message, removed from `buffer`; None while it is not whole. Raises ValueError: too long."""
    if len(buffer) < HEADER.size:
        return None
    head, body = HEADER.unpack_from(buffer)
    if head + body > most:
        raise ValueError(f"a message of {head + body} bytes; at most {most} are taken")
    end = HEADER.size + head + body
    if len(buffer) < end:
        return None
    message = json.loads(bytes(buffer[HEADER.size : HEADER.size + head]))
    data = bytes(buffer[HEADER.size + head : end])
    del buffer[:end]
    return message, data
