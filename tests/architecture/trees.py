"""The files of the core, and of the packages that are lockstep with it, as syntax trees: each is parsed once."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
CORE = ROOT / "slime_core"
KINDS = ("agents", "commands", "engines", "launchers", "sandboxes", "testing", "trainers", "weight_transports")
LOCKSTEP = sorted(
    package
    for place in (
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
