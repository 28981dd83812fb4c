"""The core's files as syntax trees, each parsed once for all tests that look at the code."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

CORE = Path(__file__).parents[2] / "slime_core"


@cache
def tree(file: Path) -> ast.Module:
    """Of one file; do not change it."""
    return ast.parse(file.read_text(encoding="utf-8"))
