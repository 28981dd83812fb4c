"""Messages between the caller and the sandbox's first process: a JSON object and bytes, over a stream socket.

Both sides use this module. Layout: two big-endian 32-bit lengths, the JSON, the bytes. Data from a sandbox is not
trusted, so a length above the reader's limit ends the connection.
"""

from __future__ import annotations

import json
import struct
from typing import Any

HEADER = struct.Struct(">II")
MOST = 1 << 30


def pack(message: dict[str, Any], body: bytes = b"") -> bytes:
    """Encode a message for the socket."""
    head = json.dumps(message).encode()
    return HEADER.pack(len(head), len(body)) + head + body


def take(buffer: bytearray, most: int = MOST) -> tuple[dict[str, Any], bytes] | None:
    """Remove the first message from `buffer` and return it; None if it is incomplete. Raises ValueError: too long."""
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
