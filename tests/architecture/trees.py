"""The files of the core, and of the packages that are lockstep with it, as syntax trees: each is parsed once."""

from __future__ import annotations

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import TypeVar

Node = TypeVar("Node", bound=ast.AST)

ROOT = Path(__file__).parents[2]
CORE = ROOT / "slime_core"
KINDS = ("agents", "commands", "engines", "launchers", "sandboxes", "testing", "trainers", "weight_transports")
LOCKSTEP = sorted(
    package
    for place in (
        "embedded",
        "python",
        *(f"{kind}/*" for kind in KINDS),
        "environments/session",
        "hooks/trackers",
        "hooks/shadow",
        "models/vision_language",
    )
    for package in ROOT.glob(f"plugins/{place}/slime_*")
)
"""Packages that use more of the core than its public names, and are held to the same rules."""


def files() -> list[tuple[Path, str]]:
    """(file, its name in lists of exceptions) of the core and of those packages."""
    core = [(file, file.relative_to(CORE).as_posix()) for file in sorted(CORE.rglob("*.py"))]
    rest = [(file, file.relative_to(top.parent).as_posix()) for top in LOCKSTEP for file in sorted(top.rglob("*.py"))]
    return core + rest


@cache
def tree(file: Path) -> ast.Module:
    """Of one file; do not change it."""
    return ast.parse(file.read_text(encoding="utf-8"))


@cache
def _by_type(file: Path) -> dict[type, list[ast.AST]]:
    found = defaultdict(list)
    for node in ast.walk(tree(file)):
        found[type(node)].append(node)
    return found


def nodes(file: Path, kind: type[Node]) -> list[Node]:
    """All of one kind in one file."""
    return _by_type(file).get(kind, [])  # type: ignore[return-value]


def called(call: ast.Call) -> str:
    """The last word of the name of a function that is called; empty where it has none."""
    return getattr(call.func, "attr", "") or getattr(call.func, "id", "")
