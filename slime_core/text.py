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
        hidden = {c for c in cut if c not in "\n\t" and unicodedata.category(c) in _HIDDEN}
        cut = cut.translate({ord(c): c.encode("unicode_escape").decode() for c in hidden})
    return cut if limit is None or len(text) <= limit else f"{cut} ... ({len(text) - limit:,} characters more)"


def json_text(value: object, indent: int | None = None) -> str:
    """Return ASCII JSON that every reader accepts: NaN and infinities become null, other objects become strings."""
    return json.dumps(_finite(value), indent=indent, default=str, allow_nan=False)


def held_back(text: str, stops: Sequence[str]) -> int:
    """Return the number of characters at the end of the text that may be the beginning of a stop string."""
    return max((n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)


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
