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
LOCKSTEP = sorted(
    ROOT / "plugins" / place
    for place in (
        "serving/slime_agent_base_url",
        "commands/slime_commands",
        "data/slime_data",
        "embedded/slime_embedded",
        "engines/slime_engine_http",
        "engines/slime_engine_sglang",
        "engines/slime_engine_vllm",
        "environments/slime_environments/session",
        "estimators/slime_estimators/covariance",
        "estimators/slime_estimators/distillation",
        "hooks/slime_hooks/adaptive_kl",
        "hooks/slime_hooks/shadow",
        "hooks/slime_hooks/trackers",
        "data/slime_hub",
        "launchers/slime_launcher_ray",
        "launchers/slime_submit",
        "models/slime_models/vision_language",
        "python/slime_python",
        "python/slime_trl",
        "rewards/slime_rewards/processes",
        "rewards/slime_rewards/signatures",
        "runs/slime_runs",
        "environments/slime_sandbox_local",
        "serving/slime_serving",
        "testing/slime_testing_contracts",
        "testing/slime_testing_probes",
        "trainers/megatron/slime_trainer_megatron",
        "weight_transports/delta/slime_weight_transport_delta",
    )
)
"""Folders of packages that use more of the core than its public names, and are held to the same rules."""


def files() -> list[tuple[Path, str]]:
    """Return (file, its name in lists of exceptions) of the core and of those folders."""
    core = [(file, file.relative_to(CORE).as_posix()) for file in sorted(CORE.rglob("*.py"))]
    rest = [(file, _from_package(file)) for top in LOCKSTEP for file in sorted(top.rglob("*.py"))]
    return core + rest


def _from_package(file: Path) -> str:
    """Return the path from the folder that has the package."""
    parts = file.relative_to(ROOT / "plugins").parts
    return "/".join(parts[next(i for i, part in enumerate(parts) if part.startswith("slime_")) :])


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
