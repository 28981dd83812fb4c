"""Curves, tables and numbers on a terminal; what a model wrote goes through `plain`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from slime_core.text import plain

_BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """A curve of at most `width` characters, each the mean of its share of the values."""
    finite = [v for v in values if v == v and abs(v) != float("inf")]
    if not finite:
        return ""
    count = min(width, len(finite))
    edges = [i * len(finite) // count for i in range(count + 1)]
    means = [sum(finite[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    step = (high - low) / (len(_BARS) - 1)
    return "".join(_BARS[round((v - low) / step) if step else 0] for v in means)


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of columns as wide as their widest cell, in which names lie that anybody gave; numbers to the right."""
    rows = [[plain(cell).replace("\n", "\\n") for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(_cell(cell, width) for cell, width in zip(row, widths)).rstrip() for row in rows]


def _cell(cell: str, width: int) -> str:
    return cell.rjust(width) if cell[:1].isdigit() or cell[:1] in "-+" else cell.ljust(width)


def number(value: float | None) -> str:
    """Four digits, or a dash."""
    return "-" if value is None else f"{value:.4g}"


def one_line(text: str, limit: int) -> str:
    """Escape the text as `plain` does, and join it to one line."""
    return plain(" ".join(text.split()), limit)
