"""Text of models, tools and data on a terminal: characters that move the cursor, ring or reorder text are escaped.

Commands that print such text, and slime's own warnings and errors, use `plain`; output for programs (`--json`) uses
`json_text`.
"""

from __future__ import annotations

import json
import math
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

_HIDDEN = {"Cc", "Cf", "Co", "Cs", "Zl", "Zp"}
"""Unicode categories to escape: control, format (including bidi), private, surrogate, line separators."""


def plain(text: str, limit: int | None = None) -> str:
    """Escape control and format characters except newlines and tabs; cut the text after `limit` characters."""
    cut = text if limit is None or len(text) <= limit else text[:limit]
    if not (cut.isascii() and cut.isprintable()):
        cut = "".join(c if c in "\n\t" or unicodedata.category(c) not in _HIDDEN else _spelled(c) for c in cut)
    return cut if limit is None or len(text) <= limit else f"{cut} ... ({len(text) - limit:,} characters more)"


def one_line(text: str, limit: int) -> str:
    """Escape the text as `plain` does, and join it to one line."""
    return plain(" ".join(text.split()), limit)


def json_text(value: object, indent: int | None = None) -> str:
    """Return ASCII JSON that every reader accepts: NaN and infinities become null, other objects become strings."""
    return json.dumps(_finite(value), indent=indent, default=str, allow_nan=False)


def held_back(text: str, stops: Sequence[str]) -> int:
    """Return the number of characters at the end of the text that may be the beginning of a stop string."""
    held = 0
    for stop in filter(None, stops):
        at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
        while at >= 0 and not stop.startswith(text[at:]):
            at = text.find(stop[0], at + 1)
        held = max(held, len(text) - at if at >= 0 else 0)
    return held


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Format rows as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]


def _finite(value: Any) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(inner) for key, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, list | tuple) else value


def _spelled(character: str) -> str:
    return f"\\x{ord(character):02x}" if ord(character) < 256 else f"\\u{ord(character):04x}"
