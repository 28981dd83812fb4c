"""Rows of text -> an aligned plain table, for every benchmark script. Standard library only."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell; the first is left-aligned, the others right-aligned."""
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    rendered = [
        "  ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths))).rstrip()
        for line in lines
    ]
    return "\n".join([rendered[0], "  ".join("-" * width for width in widths), *rendered[1:]])


def spread(values: Sequence[float]) -> str:
    """How noisy a measurement was: (largest - smallest) / median, in percent."""
    median = statistics.median(values)
    return f"{100 * (max(values) - min(values)) / median:.0f}%" if len(values) > 1 and median else "-"
