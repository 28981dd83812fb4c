"""How large the core is: modules, lines, kinds, public names, and what a run in one process imports of it.

`make size` prints the table; `tests/architecture/test_size.py` holds ceilings to the same numbers. With `--demo` a run
of two rollouts is made from the template `demo` in a directory that goes away (half a minute). A public name is a
function, class or constant at a module's top level without a leading underscore. Standard library only.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_DEMO = """
import json, sys
from slime_core.cli.main import main
status = main(["train", "--config", "run.yaml", "--num-rollout", "2"])
loaded = [n for n, m in list(sys.modules.items()) if n.startswith("slime_") and getattr(m, "__file__", None)]
json.dump(sorted(loaded), open("modules.json", "w"))
sys.exit(status)
"""


@dataclass(frozen=True)
class Size:
    """Of all modules together."""

    modules: int
    lines: int
    code_lines: int
    """Without docstrings, comments and empty lines."""
    public_names: int
    kinds: int


def measure(root: Path = ROOT, parse: Callable[[Path], ast.Module] | None = None) -> Size:
    """Read every module of `root`/slime_core; `parse` where somebody has the trees already."""
    texts = {file: file.read_text(encoding="utf-8") for file in sorted((root / "slime_core").rglob("*.py"))}
    trees = {file: parse(file) if parse else ast.parse(text) for file, text in texts.items()}
    return Size(
        modules=len(texts),
        lines=sum(text.count("\n") for text in texts.values()),
        code_lines=sum(_code_lines(texts[file], tree) for file, tree in trees.items()),
        public_names=sum(len(_public_names(tree)) for tree in trees.values()),
        kinds=sum(_kinds(tree) for file, tree in trees.items() if file.name.startswith("kinds")),
    )


def _code_lines(text: str, tree: ast.Module) -> int:
    stripped = (line.strip() for line in text.split("\n"))
    lines = {number for number, line in enumerate(stripped, 1) if line and not line.startswith("#")}
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def _public_names(tree: ast.Module) -> set[str]:
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)}
    return {name for name in names if not name.startswith("_")}


def _kinds(tree: ast.Module) -> int:
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    return sum(call.func.id == "Kind" for call in calls if isinstance(call.func, ast.Name))


def demo_modules() -> list[str]:
    """Names of slime's modules in a process that has made and trained the demo. Raises CalledProcessError."""
    with tempfile.TemporaryDirectory(prefix="slime-size-") as folder:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        for arguments in (["-m", "slime_core", "init", "demo", "run.yaml"], ["-c", _DEMO]):
            command = [sys.executable, *arguments]
            done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
            if done.returncode:
                print(done.stderr, file=sys.stderr)
                done.check_returncode()
        found: list[str] = json.loads((Path(folder) / "modules.json").read_text(encoding="utf-8"))
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--demo", action="store_true", help="also the modules that a run in one process imports")
    demo = parser.parse_args().demo
    size = measure()
    rows = [
        ("modules of slime_core", f"{size.modules:,}"),
        ("lines / code lines (without docstrings and comments)", f"{size.lines:,} / {size.code_lines:,}"),
        ("kinds", f"{size.kinds:,}"),
        ("public names", f"{size.public_names:,}"),
    ]
    if demo:
        core = sum(name.split(".")[0] == "slime_core" for name in demo_modules())
        rows.insert(2, ("modules of slime_core that the one-process demo imports", f"{core:,}"))
    for name, value in rows:
        print(f"| {name} | {value} |")


if __name__ == "__main__":
    main()
