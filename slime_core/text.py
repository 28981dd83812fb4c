"""Text of models, tools and data on a terminal: what would move the cursor, ring or reorder is spelled out.

Every command that prints such text, and slime's own warnings and errors, go through `plain`; what it prints for
programs (`--json`) through `json_text`.
"""

from __future__ import annotations

import json
import math
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

_HIDDEN = {"Cc", "Cf", "Co", "Cs", "Zl", "Zp"}
"""Control, format (bidi among them), private, surrogate, separators of lines."""


def plain(text: str, limit: int | None = None) -> str:
    """The text with control and format characters escaped, newlines and tabs left; cut after `limit` characters."""
    cut = text if limit is None or len(text) <= limit else text[:limit]
    if not (cut.isascii() and cut.isprintable()):
        cut = "".join(c if c in "\n\t" or unicodedata.category(c) not in _HIDDEN else _spelled(c) for c in cut)
    return cut if limit is None or len(text) <= limit else f"{cut} ... ({len(text) - limit:,} characters more)"


def one_line(text: str, limit: int) -> str:
    """As `plain`, on one line."""
    return plain(" ".join(text.split()), limit)


def json_text(value: Any, indent: int | None = None) -> str:
    """ASCII JSON that every reader takes: NaN and infinities are null, and what JSON has no form for is its text."""
    return json.dumps(_finite(value), indent=indent, default=str, allow_nan=False)


def held_back(text: str, stops: Sequence[str]) -> int:
    """How many characters at the end of the text may turn out to be the beginning of a stop string."""
    held = 0
    for stop in filter(None, stops):
        at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
        while at >= 0 and not stop.startswith(text[at:]):
            at = text.find(stop[0], at + 1)
        held = max(held, len(text) - at if at >= 0 else 0)
    return held


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(inner) for key, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, list | tuple) else value


def _spelled(character: str) -> str:
    return f"\\x{ord(character):02x}" if ord(character) < 256 else f"\\u{ord(character):04x}"
